"""Draws answers from every kind of support while weights are pushed, and writes them down: python
support_scenario.py ENGINE MODEL OUT.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from generation_support import SUPPORTED_PROMPT, SUPPORTS, model_from, weights_of

from async_rl.composition.compose import compose_unchecked
from async_rl.core.codec import encode
from async_rl.core.errors import DataError
from async_rl.core.support import Support
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import Completion
from async_rl.weights.block import SharedTensors, tensor_spec

TEMPERATURE = 0.7
DRAFTS = (
    'speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,'
    '"prompt_lookup_min":1}'
)


async def drawn(
    engine: Any, name: str, support: Support, max_new_tokens: int = 100
) -> list[Completion]:
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=max_new_tokens, support=support)
    return [done async for done in engine.generate(name, SUPPORTED_PROMPT, 6, sampling)]


async def refusal(engine: Any, name: str, support: Support) -> str:
    try:
        await drawn(engine, name, support)
    except DataError as error:
        return str(error)
    return "accepted"


async def scenario(engine: Any, model: Any, supports: dict[str, Support]) -> dict[str, Any]:
    specs = [tensor_spec(name, tensor) for name, tensor in weights_of(model, 0).items()]
    with SharedTensors(specs) as publisher:
        await engine.load_weights(publisher.write(0, weights_of(model, 0).values()))
        # Grammars are compiled before the push.
        for name, support in supports.items():
            await drawn(engine, f"first-{name}", support, 1)
        kinds = [
            asyncio.create_task(drawn(engine, name, support)) for name, support in supports.items()
        ]
        # The first tokens are of version 0.
        await asyncio.sleep(0.02)
        await engine.load_weights(publisher.write(1, weights_of(model, 1).values()))
        said = dict(zip(supports, await asyncio.gather(*kinds), strict=True))
        bad = Support(grammar='{"type": 7}'), Support(logit_bias={100_000: 1.0})
        refused = [await refusal(engine, f"bad-{i}", support) for i, support in enumerate(bad)]
        after = await drawn(engine, "after", SUPPORTS["schema"])
    return {"drawn": said, "refused": refused, "after": after}


async def run(kind: str, path: Path) -> dict[str, Any]:
    supports = SUPPORTS
    limits = """generation.sampling=["top_k=20","top_p=0.9"]"""
    if kind == "drafts":
        # vLLM has neither a bias nor processors of logits next to drafts.
        supports = {
            name: support
            for name, support in SUPPORTS.items()
            if not support.logit_bias and not support.is_truncated
        }
        limits = f"generation.vllm.extra=['{DRAFTS}']"
    overrides = [
        f"generation.engine={'hf' if kind == 'hf' else 'vllm'}",
        limits,
        f"generation.temperature={TEMPERATURE}",
        "generation.vllm.enforce_eager=true",
        "rollout.fn=external",
        f"model.path={path}",
    ]
    config = compose_unchecked("grpo_code", overrides)
    prepare_environment(config, [])
    engine = await engine_opener(config, path)()
    try:
        return await scenario(engine, model_from(path), supports)
    finally:
        await engine.close()


if __name__ == "__main__":
    Path(sys.argv[3]).write_bytes(encode(asyncio.run(run(sys.argv[1], Path(sys.argv[2])))))
