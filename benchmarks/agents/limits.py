"""Measure what one agent may do to a gateway: the longest time for which one request blocks its
event loop, and the memory of many open sessions.

Run: `python -m benchmarks.agents.limits [--only blocks|memory] [--sessions N]`.

blocks: each request is sent by another process, once to a session with the default limit of turns
and once to one without a limit. Next to the longest block is the most CPU time of the process
between two wakes of its loop, which other work on the machine does not change. memory: sessions of
an agent that rewrites its history, `_CALLS` calls with prompts of `_PROMPT` characters each, are
held open and then closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app, spare_heap
from async_rl.wire.http import serving
from benchmarks.agents.agents_delays import Delays
from benchmarks.agents.agents_processes import text, tokenizer
from benchmarks.agents.trees import open_session
from benchmarks.figures import figure

_MB = 1 << 20
_CALLS, _PROMPT = 30, 4096
_TURNS = 100
_LIMIT = 1 << 17
"""Tokens of a session: the largest bodies are read."""
_CLIENT = """
import http.client, sys
port, token, path, file = sys.argv[1:]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=600)
head = {"authorization": "Bearer " + token, "content-type": "application/json"}
connection.request("POST", path, open(file, "rb"), head)
answer = connection.getresponse()
answer.read()
print(answer.status)
"""
"""A client in a process of its own: its work is not the gateway's."""


def _user(content: str) -> Any:
    return {"role": "user", "content": content}


def requests() -> Iterator[tuple[str, str, Any]]:
    """Yield a name, a path and a body."""
    chat = "/v1/chat/completions"
    rng = random.Random(0)
    words = text(rng, 2 * _MB)[: 15 * _MB]
    yield "15 MB of words", chat, {"messages": [_user(words)]}
    yield "15 MB without a space", chat, {"messages": [_user("a" * 15 * _MB)]}
    yield "15 MB of spaces", chat, {"messages": [_user(" " * 15 * _MB)]}
    yield "15 MB in 200,000 messages", chat, {"messages": [_user("word" * 10)] * 200_000}
    yield "5,000 messages", chat, {"messages": [_user(text(rng, 20)) for _ in range(5000)]}
    yield "3,000,000 token ids", "/v1/completions", {"prompt": [77] * 3_000_000}
    yield "a stop text of 100 KB", chat, {"messages": [_user("go")], "stop": "x" * 100_000}
    yield "1,000 stop texts", chat, {"messages": [_user("go")], "stop": ["x" * 100] * 1000}
    yield "6,400 answers", "/v1/completions", {"prompt": ["go"] * 50, "n": 128, "max_tokens": 1}
    prompts = [text(rng, 20) for _ in range(6400)]
    yield "6,400 prompts", "/v1/completions", {"prompt": prompts, "max_tokens": 1}


async def blocks(folder: Path) -> None:
    """Print the longest block of the event loop during each request."""
    words, sessions, delays = tokenizer(), Sessions(), Delays()
    file = folder / "body"
    listener = socket.create_server(("127.0.0.1", 0))
    spare_heap()
    watching = asyncio.create_task(delays.watch())
    async with serving(build_app(sessions), listener):
        port = listener.getsockname()[1]
        for name, path, body in requests():
            await asyncio.to_thread(file.write_text, json.dumps({"model": "policy", **body}))
            del body
            for turns in (_TURNS, 1 << 20):
                session = open_session(words, 0)
                session.max_turns = turns
                session.limit = _LIMIT
                with sessions.open(session):
                    await asyncio.sleep(0.1)
                    delays.told()
                    started_s = time.perf_counter()
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-c", _CLIENT, str(port), session.token, path, str(file)),
                        stdout=asyncio.subprocess.PIPE,
                    )
                    status = (await process.communicate())[0].decode().strip()
                    took_s = time.perf_counter() - started_s
                    longest = delays.told()
                what = f"{name}, {'a limit of turns' if turns == _TURNS else 'no limit'}"
                figure(f"{what}: status {status}, answered after", took_s, "s")
                figure(f"{what}: longest block", longest["lag_ms"][-1] / 1000, "s")
                figure(f"{what}: its CPU time", longest["cpu_ms"][-1] / 1000, "s")
    watching.cancel()


async def memory(num_sessions: int) -> None:
    """Print the resident memory with open sessions, and after their end."""
    words, sessions, process = tokenizer(), Sessions(), psutil.Process()
    spare_heap()
    rng = random.Random(0)
    prompts = [text(rng, 1000)[:_PROMPT] for _ in range(200)]

    async def agent(session: Any) -> None:
        for _ in range(_CALLS):
            call = session.chat_call([_user(rng.choice(prompts))], [])
            (number,) = session.begin([call])
            await session.answer(call, number)

    def show(when: str) -> None:
        figure(f"resident memory {when}", process.memory_info().rss / _MB, "MB")

    for lap in ("first", "second"):
        with contextlib.ExitStack() as stack:
            show(f"before the {lap} {num_sessions} sessions")
            for seed in range(num_sessions):
                session = stack.enter_context(sessions.open(open_session(words, seed)))
                await agent(session)
            del session
            show("with all of them open")
        show("after their end")
        gc.collect()
        show("after a full collection")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=["blocks", "memory"])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    args = parser.parse_args()
    if args.only != "memory":
        args.folder.mkdir(exist_ok=True)
        asyncio.run(blocks(args.folder))
    if args.only != "blocks":
        asyncio.run(memory(args.sessions))


if __name__ == "__main__":
    main()
