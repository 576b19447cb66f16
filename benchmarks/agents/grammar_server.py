"""Compare the tokens per second of answers by a JSON schema through the gateway with those of
vLLM's own server with the same schema, and both without.

Run: `python -m benchmarks.agents.grammar_server [--rounds N]`. Both answer the same calls of
`/v1/chat/completions`, 64 at a time on kept connections, in alternating rounds; each asks for the
log-probs of its tokens, as training needs them. A random model has the shape of the embedded one.
Engine and gateway are two processes, and so are the core and the front of vLLM's server; all of
them may use all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.wire.rpc import create_keys
from benchmarks.agents.agents import Agent
from benchmarks.agents.agents_processes import (
    IN_FLIGHT,
    LONGEST,
    all_cores,
    child,
    text,
    tokenizer,
    told,
)
from benchmarks.figures import figure
from benchmarks.generation.generation import random_model
from benchmarks.generation.grammar_rate import SCHEMA

_CALLS = 192
_START_S = 300.0
FORMAT = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": json.loads(SCHEMA)},
    }
}


async def play(port: int, tokens: Iterator[str], number: int, more: dict[str, Any]) -> float:
    """Return the tokens per second of one round."""
    rng = random.Random(number)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(content: str, token: str) -> int:
        async with slots:
            caller = Agent(port, token)
            messages = [{"role": "user", "content": content}]
            answer = await caller.say(messages, max_tokens=LONGEST, logprobs=True, **more)
            caller.close()
            return int(answer["usage"]["completion_tokens"])

    asked = [text(rng, 10) for _ in range(_CALLS)]
    started_s = time.perf_counter()
    counts = await asyncio.gather(*(one(content, next(tokens)) for content in asked))
    return sum(counts) / (time.perf_counter() - started_s)


async def is_up(port: int) -> None:
    """Wait until a server listens. Raises TimeoutError after `_START_S`."""
    async with asyncio.timeout(_START_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.5)


def free_port() -> int:
    """Return a port that no socket has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def compare(folder: Path, rounds: int) -> None:
    """Start both sides and alternate their rounds."""
    words = tokenizer()
    words.save_pretrained(random_model(folder / "model", vocabulary=len(words)))
    stock_port = free_port()
    async with (
        child("engine", folder, "grammar", cores=all_cores()) as engine,
        child(
            *("gateway", folder, (await told(engine))["address"], 2 * (rounds + 1) * _CALLS),
            cores=all_cores(),
        ) as served,
        child("stock", folder, stock_port, cores=all_cores()) as stock,
    ):
        opened = await told(served)
        await is_up(stock_port)
        sides = {
            "gateway": (opened["port"], iter(opened["tokens"])),
            "vLLM's server": (stock_port, iter(lambda: "none", "")),
        }
        kinds: dict[str, dict[str, Any]] = {"without a schema": {}, "with a schema": FORMAT}
        rates: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            for kind, more in kinds.items():
                for name, (port, tokens) in sides.items():
                    rate = await play(port, tokens, number, more)
                    # The first round compiles and fills caches.
                    if number:
                        rates.setdefault((name, kind), []).append(rate)
        stock.terminate()
    for (name, kind), found in rates.items():
        figure(f"{name}, {kind}", statistics.median(found), "tokens/s")
    for kind in kinds:
        pairs = zip(rates["gateway", kind], rates["vLLM's server", kind], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        figure(f"gateway over vLLM's server, {kind}", statistics.median(ratios), "x")
        figure("lowest round", min(ratios), "x")
        figure("highest round", max(ratios), "x")


def main() -> None:
    """Run the comparison in a folder of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_keys(folder)
        asyncio.run(compare(folder, options.rounds))


if __name__ == "__main__":
    main()
