"""Draws answers from every kind of support while weights are pushed."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from generation_support import NEEDS_NO_TOKENS, SUPPORTED_PROMPT, SUPPORTS, model_from, weights_of

from async_rl.composition.compose import compose_unchecked
from async_rl.core.calls import NO_ALTERNATIVES, Alternatives, Support
from async_rl.core.errors import DataError
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import Completion
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

TEMPERATURE = 0.7
NUM_SAMPLES = 3
DRAFTS = (
    'speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,'
    '"prompt_lookup_min":1}'
)


async def drawn(
    engine: Any,
    name: str,
    support: Support,
    max_new_tokens: int = 100,
    drafts: bytes = b"",
    alternatives: Alternatives = NO_ALTERNATIVES,
    prompt: Sequence[int] = SUPPORTED_PROMPT,
) -> list[Completion]:
    sampling = Sampling(
        temperature=TEMPERATURE,
        max_new_tokens=max_new_tokens,
        support=support,
        drafts=drafts,
        alternatives=alternatives,
    )
    return [done async for done in engine.generate(name, prompt, NUM_SAMPLES, sampling)]


async def refusal(engine: Any, name: str, support: Support, **how: Any) -> str:
    try:
        await drawn(engine, name, support, **how)
    except DataError as error:
        return str(error)
    return "accepted"


@contextlib.asynccontextmanager
async def between_tokens(engine: Any, kinds: set[str], num_requests: int) -> AsyncIterator[None]:
    """Hold vLLM back until all requests of the block are there, and pause it once each kind has
    a token: a kind might end during a push that is prepared next to the steps.
    """
    if "vllm" not in type(engine).__module__:
        yield
        # Requests take turns: whoever came before a short one has tokens when it ends.
        await drawn(engine, "a short one", Support(), 2)
        return
    from vllm.v1.engine.core import EngineCore

    loop = asyncio.get_running_loop()
    has_all = asyncio.Event()
    came: list[str] = []
    left = set(kinds)
    add, after_step = EngineCore.add_request, EngineCore.post_step

    def add_request(core: Any, request: Any, *more: Any) -> None:
        add(core, request, *more)
        came.append(request.request_id)
        if len(came) == num_requests * NUM_SAMPLES:
            core.resume_scheduler()

    def post_step(core: Any, is_executed: bool) -> None:
        after_step(core, is_executed)
        # The id of a sample: its number, the name of the request, and a random text.
        for run in core.scheduler.running:
            name = re.match(r"\d+_(.*)-\w+$", run.request_id)
            if name and run.num_output_tokens:
                left.discard(name[1])
        if not left and not has_all.is_set():
            core.pause_scheduler("keep", False)
            loop.call_soon_threadsafe(has_all.set)

    await engine.sleep()
    with (
        mock.patch.object(EngineCore, "add_request", add_request),
        mock.patch.object(EngineCore, "post_step", post_step),
    ):
        yield
        await has_all.wait()


async def scenario(
    engine: Any, model: Any, supports: dict[str, Support], *, has_drafts: bool
) -> dict[str, Any]:
    specs = [tensor_spec(name, tensor) for name, tensor in weights_of(model, 0).items()]
    with SharedTensors(specs) as publisher:
        await engine.load_weights(publisher.write(0, weights_of(model, 0).values()))
        # Grammars are compiled before the push.
        kinds = []
        for name, support in supports.items():
            first = await drawn(engine, f"first-{name}", support, 40 if has_drafts else 1)
            earlier = b"".join(done.token_ids.tobytes() for done in first) if has_drafts else b""
            kinds.append(drawn(engine, name, support, drafts=earlier))
        shown = Alternatives(num_top=3, num_prompt_top=2)
        kinds += [
            drawn(engine, f"shown-{name}", support, alternatives=shown)
            for name, support in supports.items()
        ]
        async with between_tokens(engine, set(supports), len(kinds)):
            kinds = [asyncio.create_task(kind) for kind in kinds]
        await engine.load_weights(publisher.write(1, weights_of(model, 1).values()))
        everything = await asyncio.gather(*kinds)
        said = dict(zip(supports, everything, strict=False))
        shown_of = dict(zip(supports, everything[len(supports) :], strict=True))
        bad = (
            Support(grammar='{"type": 7}'),
            Support(logit_bias={100_000: 1.0}),
            Support(grammar=NEEDS_NO_TOKENS),
        )
        refused = [await refusal(engine, f"bad-{i}", support) for i, support in enumerate(bad)]
        refused.append(await refusal(engine, "beyond", Support(), prompt=[1, 100_000]))
        after = await drawn(engine, "after", SUPPORTS["schema"])
    return {"drawn": said, "shown": shown_of, "refused": refused, "after": after}


async def main(kind: str, path: Path) -> dict[str, Any]:
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
        has_drafts = kind == "drafts"
        return await scenario(engine, model_from(path), supports, has_drafts=has_drafts)
    finally:
        await engine.close()
