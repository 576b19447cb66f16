"""Compare the tokens per second without drafts, with drafts by n-gram lookup in the row, and with
drafts that earlier responses to the same prompt give too.

Run: `python -m benchmarks.generation.draft_rate [--model DIR] [--rounds N] [--core N]`.
The embedded model answers the same held-out prompts in each round; the earlier responses are those
of the last round without them. Two temperatures: the lower, the more responses repeat. Both
engines, without and with drafts, exist at the same time on one core; their rounds take turns. The
ratios are computed from CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from async_rl.composition.compose import compose
from async_rl.core.types import Sampling
from async_rl.data.model_files import prepare_model
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from benchmarks.embedded import list_functions
from benchmarks.figures import figure
from benchmarks.generation.generation import Child, Clock, parameters, settings, tell

NUM_GROUPS, GROUP_SIZE, IN_FLIGHT = 32, 8, 32
LONGEST = 60
TEMPERATURES = (1.0, 0.3)
DRAFTS = (
    'generation.vllm.extra=[\'speculative_config={"method":"ngram","num_speculative_tokens":4,'
    '"prompt_lookup_min":2,"prompt_lookup_max":6}\']'
)
KINDS = ("none", "row", "earlier")


def prompts(model: Path) -> list[list[int]]:
    """Return held-out prompts of the embedded task as tokens of the model."""
    tokenizer: Any = load_tokenizer(settings(model), model)
    _, specs = list_functions.split()
    texts = [list_functions.wording(spec, 0) for spec in specs[:NUM_GROUPS]]
    rows: list[list[int]] = tokenizer(texts)["input_ids"]
    return rows


async def be(model: Path, overrides: list[str]) -> None:
    """Run one engine; each line on stdin names a round: the number of its temperature, plus the
    number of temperatures if earlier responses give drafts.
    """
    from async_rl.weights.block import SharedTensors
    from async_rl.weights.tensors import tensor_spec

    engine = await engine_opener(settings(model, *overrides), model)()
    tensors = parameters(model)
    publisher = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    await engine.load_weights(publisher.write(0, tensors.values()))
    rows = prompts(model)
    slots = asyncio.Semaphore(IN_FLIGHT // GROUP_SIZE)
    earlier: dict[tuple[float, int], bytes] = {}
    num_played = 0

    async def group(index: int, temperature: float, has_earlier: bool) -> int:
        key = temperature, index
        drafts = earlier[key] if has_earlier else b""
        sampling = Sampling(temperature=temperature, max_new_tokens=LONGEST, drafts=drafts)
        name = f"{num_played}-{index}"
        async with slots:
            drawn = [
                sample.token_ids
                async for sample in engine.generate(name, rows[index], GROUP_SIZE, sampling)
            ]
        earlier[key] = b"".join(ids.tobytes() for ids in drawn)
        return sum(map(len, drawn))

    tell(start_s=0.0)
    while line := await asyncio.to_thread(sys.stdin.readline):
        has_earlier, which = divmod(int(line), len(TEMPERATURES))
        num_played += 1
        clock = Clock()
        groups = (group(i, TEMPERATURES[which], bool(has_earlier)) for i in range(NUM_GROUPS))
        tell(num_tokens=sum(await asyncio.gather(*groups)), **clock.read())
    await engine.close()
    publisher.close()


def main() -> None:
    """Compare the kinds of drafts, or be one of the engines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--child", choices=["plain", "drafts"])
    options = parser.parse_args()
    if options.child:
        prepare_environment(settings(options.model), [options.core])
        asyncio.run(be(options.model, [DRAFTS] if options.child == "drafts" else []))
        return
    model = options.model or prepare_model(compose("grpo_code", []), lambda *_: None)
    module = "benchmarks.generation.draft_rate"
    plain, drafts = (Child(kind, model, options.core, module) for kind in ("plain", "drafts"))
    rates: dict[tuple[int, str], list[float]] = {}
    for index in range(options.rounds + 1):
        for which in range(len(TEMPERATURES)):
            plain.play(which)
            drafts.play(which)
            drafts.play(which + len(TEMPERATURES))
            played = (plain.rounds[-1], *drafts.rounds[-2:])
            for kind, one in zip(KINDS, played, strict=True):
                # The first round of each kind warms up.
                if index:
                    rate = one["num_tokens"] / one["cpu_s"]
                    rates.setdefault((which, kind), []).append(rate)
    plain.close()
    drafts.close()
    for (which, kind), found in rates.items():
        name = f"temperature {TEMPERATURES[which]}, drafts: {kind}"
        figure(name, statistics.median(found), "tokens/CPU s")
        ratios = [a / b for a, b in zip(found, rates[which, "none"], strict=True)]
        figure(f"{name}, over none", statistics.median(ratios), "x")
        figure("lowest and highest round", min(ratios), "x")
        figure("lowest and highest round", max(ratios), "x")


if __name__ == "__main__":
    main()
