"""Draws answers from every kind of support while weights are pushed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from engine_scenario import refusal
from generation_support import (
    NEEDS_NO_TOKENS,
    SUPPORTED_PROMPT,
    SUPPORTS,
    model_from,
    publisher_of,
    weights_of,
)

from async_rl.composition.compose import compose_unchecked
from async_rl.core.calls import Alternatives, Support
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import Completion

TEMPERATURE = 0.7
NUM_SAMPLES = 3
DRAFTS = (
    'speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,'
    '"prompt_lookup_min":1}'
)


async def drawn(
    engine: Any, name: str, support: Support, *, prompt: Any = SUPPORTED_PROMPT, **how: Any
) -> list[Completion]:
    how = {"max_new_tokens": 100, **how}
    sampling = Sampling(temperature=TEMPERATURE, support=support, **how)
    return [done async for done in engine.generate(name, prompt, NUM_SAMPLES, sampling)]


async def scenario(engine: Any, model: Any, supports: dict[str, Support], has_drafts: bool) -> Any:
    with publisher_of(weights_of(model, 0)) as publisher:

        async def push(version: int) -> None:
            await engine.load_weights(publisher.write(version, weights_of(model, version).values()))

        await push(0)
        # Grammars are compiled before the push.
        kinds = []
        for name, support in supports.items():
            num = 40 if has_drafts else 1
            first = await drawn(engine, f"first-{name}", support, max_new_tokens=num)
            earlier = b"".join(done.token_ids.tobytes() for done in first) if has_drafts else b""
            kinds.append(drawn(engine, name, support, drafts=earlier))
        shown = Alternatives(num_top=3, num_prompt_top=2)
        kinds += [
            drawn(engine, f"shown-{name}", support, alternatives=shown)
            for name, support in supports.items()
        ]
        # All start together, and rest between two tokens while the push is prepared.
        await engine.sleep()
        running = [asyncio.create_task(kind) for kind in kinds]
        await push(0)
        for _ in range(5):
            await engine.logprobs([np.array(SUPPORTED_PROMPT, np.int32)])
        await engine.sleep()
        await push(1)
        everything = await asyncio.gather(*running)
        said = dict(zip(supports, everything, strict=False))
        shown_of = dict(zip(supports, everything[len(supports) :], strict=True))
        bad = (
            Support(grammar='{"type": 7}'),
            Support(logit_bias={100_000: 1.0}),
            Support(grammar=NEEDS_NO_TOKENS),
        )
        wrong = [drawn(engine, f"bad-{i}", support) for i, support in enumerate(bad)]
        wrong.append(drawn(engine, "beyond", Support(), prompt=[1, 100_000]))
        refused = [await refusal(each) for each in wrong]
        after = await drawn(engine, "after", SUPPORTS["schema"])
    return {"drawn": said, "shown": shown_of, "refused": refused, "after": after}


async def main(kind: str, path: Path) -> dict[str, Any]:
    supports = SUPPORTS
    limits = """generation.sampling=["top_k=20","top_p=0.9"]"""
    if kind == "drafts":
        # vLLM has neither a bias nor processors of logits next to drafts.
        limits = f"generation.vllm.extra=['{DRAFTS}']"
        plain = (it for it in SUPPORTS.items() if not (it[1].logit_bias or it[1].is_truncated))
        supports = dict(plain)
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
        return await scenario(engine, model_from(path), supports, kind == "drafts")
    finally:
        await engine.close()
