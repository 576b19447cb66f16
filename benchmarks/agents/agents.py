"""Measure the cost of the agents' endpoint: the overhead of a call with many open sessions and a
simulated engine, and the tokens per second of real vLLM through it against the direct path.

Run: `python -m benchmarks.agents.agents [--sessions N] [--rounds N] [--only calls|vllm]`.

The engine, the gateway and the agents are three processes, as in a run (agents_processes.py). The
agents are plain HTTP clients on kept connections, so that the time
of an SDK is not counted as time of the gateway.

calls: every session makes `_TURNS` calls that repeat and extend its history. The engine answers
after `ENGINE_S`, and the agent thinks as long. The overhead of a call is its duration without
`ENGINE_S`. vllm: the same prompts are answered by the engine in its own process, and for agents
through the gateway, in alternating rounds. The engine is pinned to one core, the rest to others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from async_rl.sessions.server import spare_heap
from async_rl.wire.rpc import create_keys
from benchmarks.agents.agents_delays import Delays, quantiles
from benchmarks.agents.agents_processes import (
    ANSWER,
    ENGINE_S,
    IN_FLIGHT,
    LONGEST,
    all_cores,
    child,
    spent,
    text,
    tokenizer,
    told,
)
from benchmarks.figures import figure
from benchmarks.generation.generation import random_model

_TURNS = 4
_CALLS = 192
"""Of a round with vLLM."""


class Agent:
    """A connection that is kept, and calls on it."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._streams: Any = None

    async def say(self, messages: list[Any], **more: Any) -> Any:
        """Return the body of the answer."""
        if self._streams is None or self._streams[0].at_eof():
            # A server closes a connection that was idle for 5 seconds.
            self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(answered.partition(b"content-length:")[2].split(b"\r\n")[0])
        content = json.loads(await reader.readexactly(size))
        if b" 200 " not in answered.split(b"\r\n")[0]:
            raise RuntimeError(content)
        return content

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()


async def calls(folder: Path, num_sessions: int) -> None:
    """Measure the overhead of a call while that many sessions are open."""
    async with (
        child("engine", folder, "simulated", cores=all_cores()) as engine_told,
        child(
            "gateway", folder, (await told(engine_told))["address"], num_sessions, cores=all_cores()
        ) as served,
    ):
        opened = await told(served)
        overheads: list[float] = []
        delays = Delays()
        watching = asyncio.create_task(delays.watch())
        spare_heap()

        async def agent(index: int, token: str) -> None:
            rng = random.Random(index)
            caller = Agent(opened["port"], token)
            messages: list[Any] = []
            # The sessions start apart, or all would always call at the same moment.
            await asyncio.sleep(2 * ENGINE_S * index / num_sessions)
            for _ in range(_TURNS):
                messages.append({"role": "user", "content": text(rng, 40)})
                started_s = time.perf_counter()
                answer = await caller.say(messages, max_tokens=ANSWER)
                overheads.append(time.perf_counter() - started_s - ENGINE_S)
                messages.append(answer["choices"][0]["message"])
                await asyncio.sleep(ENGINE_S)
            caller.close()

        before = [(await spent(process))["cpu_s"] for process in (served, engine_told)]
        delays.told()
        started_s = time.perf_counter()
        await asyncio.gather(*(agent(i, token) for i, token in enumerate(opened["tokens"])))
        wall_s = time.perf_counter() - started_s
        watching.cancel()
        gateway, engine = await spent(served), await spent(engine_told)
    p50, p99, _ = quantiles([1000 * overhead for overhead in overheads])
    in_gateway = [value - 1000 * ENGINE_S for value in gateway["call_ms"]]
    figure("agents: open sessions", num_sessions, "", goal="1000")
    figure("agents: calls", len(overheads) / wall_s, "/s")
    figure("agents: overhead of a call, p50", p50, "ms", goal="<= 5")
    figure("agents: overhead of a call, p99", p99, "ms", goal="<= 25")
    figure("agents: of it between request and answer in the gateway, p50", in_gateway[0], "ms")
    figure("agents: the same, p99", in_gateway[1], "ms")
    figure("agents: of it the engine's timer, p50", engine["call_ms"][0], "ms")
    figure("agents: the same, p99", engine["call_ms"][1], "ms")
    for name, process in (("agents", delays.told()), ("gateway", gateway), ("engine", engine)):
        figure(f"agents: event loop of the {name} too late, p99", process["lag_ms"][1], "ms")
        figure(f"agents: the same, most, {name}", process["lag_ms"][2], "ms")
        figure(f"agents: longest garbage collection, {name}", process["gc_ms"][2], "ms")
    cpu_ms = [1000 * (p["cpu_s"] - b) for p, b in zip((gateway, engine), before, strict=True)]
    figure("agents: CPU time of the gateway per call", cpu_ms[0] / len(overheads), "ms")
    figure("agents: CPU time of the wire in the engine", cpu_ms[1] / len(overheads), "ms")


async def with_vllm(folder: Path, rounds: int) -> None:
    """Compare the tokens per second of vLLM through the gateway and on the direct path."""
    words = tokenizer()
    random_model(folder / "model", vocabulary=len(words))
    *others, last = all_cores()
    async with (
        child("engine", folder, "vllm", cores=[last]) as engine_child,
        child(
            "gateway",
            folder,
            (await told(engine_child))["address"],
            rounds * _CALLS,
            cores=others or [last],
        ) as served,
    ):
        os.sched_setaffinity(0, others or [last])
        opened = await told(served)
        tokens = iter(opened["tokens"])
        rates: dict[str, list[float]] = {"direct": [], "gateway": []}
        for index in range(rounds):
            rng = random.Random(index)
            asked = [[{"role": "user", "content": text(rng, 10)}] for _ in range(_CALLS)]
            rows = [
                words(rendered(words, one), add_special_tokens=False)["input_ids"] for one in asked
            ]
            engine_child.stdin.write(json.dumps(rows).encode() + b"\n")
            plain = await told(engine_child)
            rates["direct"].append(plain["num_tokens"] / plain["wall_s"])
            rates["gateway"].append(await through(asked, opened["port"], tokens))
    # The first round of either path compiles and fills caches.
    ratios = [
        through / plain
        for plain, through in zip(rates["direct"][1:], rates["gateway"][1:], strict=True)
    ]
    figure("agents: vLLM, direct", statistics.median(rates["direct"][1:]), "tokens/s")
    figure("agents: vLLM, through the gateway", statistics.median(rates["gateway"][1:]), "tokens/s")
    figure("agents: share of the direct path", statistics.median(ratios), "", goal=">= 0.9")


def rendered(words: Any, messages: list[Any]) -> str:
    """Return the text that the gateway renders for the same messages."""
    return str(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


async def through(asked: list[Any], port: int, tokens: Any) -> float:
    """Return the tokens per second of these calls, each in a session of its own."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(messages: list[Any], token: str) -> int:
        async with slots:
            caller = Agent(port, token)
            answer = await caller.say(messages, max_tokens=LONGEST)
            caller.close()
            return int(answer["usage"]["completion_tokens"])

    started_s = time.perf_counter()
    counts = await asyncio.gather(*(one(messages, next(tokens)) for messages in asked))
    return sum(counts) / (time.perf_counter() - started_s)


def main() -> None:
    """Run both parts, or one process of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=["calls", "vllm"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_keys(folder)
        if options.only != "vllm":
            asyncio.run(calls(folder, options.sessions))
        if options.only != "calls":
            asyncio.run(with_vllm(folder, options.rounds))


if __name__ == "__main__":
    main()
