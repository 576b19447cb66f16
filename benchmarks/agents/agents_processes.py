"""The processes of benchmarks/agents/agents.py: an engine and a gateway, each a child that it
starts.

The gateway reaches the engine over the run's wire, as in a run. Children print lines that start
with `told`, and exit when their standard input is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from async_rl.core.calls import Support
from async_rl.core.types import NO_VERSION, Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message
from async_rl.protocol.generator import (
    Complete,
    Completion,
    Continuation,
    EngineVersion,
    WatchVersion,
)
from async_rl.protocol.supervisor import Member, Members
from async_rl.rollouts.remote import RemoteEngines
from async_rl.runtime.directory import Connections, Directory, Incarnation
from async_rl.sessions.chat import Chat
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.record import Record
from async_rl.sessions.server import build_app, spare_heap
from async_rl.sessions.session import Session
from async_rl.wire.http import serving
from async_rl.wire.rpc import RpcServer, load_keys
from benchmarks.agents.agents_delays import Delays
from benchmarks.embedded.vocabulary import build_tokenizer
from benchmarks.generation.generation import parameters, settings
from benchmarks.generation.grammar_rate import OVERRIDES

ENGINE_S = 5.0
"""A call of the simulated engine."""
ANSWER = 32
"""Tokens of its answer."""
IN_FLIGHT, LONGEST = 64, 64
"""Of a round with vLLM: calls at a time, tokens of an answer."""
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_WORDS = [f"word{index}" for index in range(400)]


def tokenizer() -> Any:
    """Return a small tokenizer with a chat template."""
    made = build_tokenizer([" ".join(_WORDS)] * 3, 4096)
    made.chat_template = _TEMPLATE
    return made


def text(rng: random.Random, count: int) -> str:
    """Return words, of about two tokens each."""
    return " ".join(rng.choices(_WORDS, k=count))


# ---- the engine's process


async def engine(folder: Path, kind: str) -> None:
    """Answer Complete; with vLLM each line on stdin is a round of the direct path. An empty line
    requests the CPU time. kind: simulated, vllm, or grammar (vLLM with its tokenizer).
    """
    generate, delays = None, Delays()
    if kind != "simulated":
        from async_rl.generation.opener import engine_opener
        from async_rl.weights.block import SharedTensors
        from async_rl.weights.tensors import tensor_spec

        model = folder / "model"
        # A grammar of the configuration opens the engine with its tokenizer; requests name theirs.
        more = OVERRIDES if kind == "grammar" else []
        opened = await engine_opener(settings(model, *more), model)()
        tensors = parameters(model)
        publisher = SharedTensors([tensor_spec(name, value) for name, value in tensors.items()])
        await opened.load_weights(publisher.write(0, tensors.values()))
        generate = opened.generate

    async def complete(request: Complete) -> Message:
        if generate is None:
            began_s = time.perf_counter()
            await asyncio.sleep(ENGINE_S)
            delays.call_ms.append((time.perf_counter() - began_s - ENGINE_S) * 1000)
            return Continuation(completed=invented(request))
        completions = generate(request.request_id, request.token_ids.tolist(), 1, request.sampling)
        async with contextlib.aclosing(completions):
            done = await anext(completions)
        return Continuation(completed=done)

    async def version(request: WatchVersion) -> Message:
        if request.known.version == 0:
            await asyncio.sleep(request.wait_s)
        return EngineVersion(version=0, life=0)

    with RpcServer(
        "127.0.0.1", 0, load_keys(folder), {Complete: complete, WatchVersion: version}
    ) as server:
        answering = asyncio.create_task(server.serve())
        watching = asyncio.create_task(delays.watch())
        spare_heap()
        tell(address=server.address)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line == "\n":
                tell(cpu_s=time.process_time(), **delays.told())
                continue
            assert generate is not None, "only vLLM has a direct path"
            tell(**await direct(generate, json.loads(line)))
        watching.cancel()
        answering.cancel()


def invented(request: Complete) -> Completion:
    """Return an answer that depends on the request only."""
    count = min(ANSWER, request.sampling.max_new_tokens)
    rng = np.random.default_rng(len(request.token_ids))
    return Completion(
        token_ids=rng.integers(300, 600, count).astype(np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        versions=np.zeros(count, np.int32),
        is_truncated=False,
    )


async def direct(generate: Any, rows: list[list[int]]) -> dict[str, float]:
    """Answer rows of tokens without the gateway."""
    slots = asyncio.Semaphore(IN_FLIGHT)
    sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST)

    async def one(index: int, row: list[int]) -> int:
        async with slots, contextlib.aclosing(generate(f"d{index}", row, 1, sampling)) as done:
            return len((await anext(done)).token_ids)

    started_s = time.perf_counter()
    counts = await asyncio.gather(*(one(index, row) for index, row in enumerate(rows)))
    return {"num_tokens": sum(counts), "wall_s": time.perf_counter() - started_s}


# ---- the gateway's process


async def gateway(folder: Path, address: str, num_sessions: int) -> None:
    """Serve that many sessions until standard input is closed; each line requests the CPU time."""
    directory = Directory()
    member = Member(
        name="generator-0", role="generator", pid=1, state="serving", since_s=0.0, address=address
    )
    directory.update(Members(revision=1, since=NO_VERSION, members=[member], left=[]))
    connections = Connections(load_keys(folder), directory)
    context = SimpleNamespace(
        name="gateway-0",
        config=settings(folder),
        directory=directory,
        activity=Activity(),
        incarnation_of=lambda member: Incarnation(member, connections),
    )
    engines = RemoteEngines(cast(Any, context))
    following = asyncio.create_task(engines.follow(lambda: None))
    chat, sessions, delays = Chat(tokenizer()), Sessions(), Delays()
    watching = asyncio.create_task(delays.watch())
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(sessions.open(session_of(index, chat, engines)))
            for index in range(num_sessions)
        ]
        async with serving(delays.around(build_app(sessions)), listener):
            port = listener.getsockname()[1]
            spare_heap()
            tell(port=port, tokens=[session.token for session in opened])
            while await asyncio.to_thread(sys.stdin.readline):
                tell(cpu_s=time.process_time(), **delays.told())
    watching.cancel()
    following.cancel()
    await connections.close()


def session_of(index: int, chat: Chat, engines: RemoteEngines) -> Session:
    """Return a session as the gateway of a run opens it."""

    async def write(
        call: str, token_ids: Any, limit: int, support: Support, shown: Any
    ) -> Completion:
        sampling = Sampling(temperature=1.0, max_new_tokens=limit, support=support)
        completions = engines.generate(f"{index}/{call}", token_ids.tolist(), 1, sampling)
        done = await anext(completions)
        await completions.aclose()
        return Completion(
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            versions=done.versions,
            is_truncated=done.is_truncated,
        )

    async def run(body: bytes) -> tuple[Any, bool]:
        return None, False

    return Session(
        token=f"sk-{index}",
        session_key=f"session-{index}",
        record=Record(np.zeros(1, np.int32)),
        chat=chat,
        write=write,
        limit=1 << 20,
        max_turns=1 << 20,
        run=run,
    )


# ---- processes


def tell(**values: Any) -> None:
    """Print one line for the parent, marked because vLLM prints other lines."""
    print("told " + json.dumps(values), flush=True)


async def told(process: asyncio.subprocess.Process) -> Any:
    """Return the next line that the child tells."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"told "):
            return json.loads(line.removeprefix(b"told "))
    raise RuntimeError(f"the process exited with {await process.wait()}")


async def spent(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return the CPU time of a process, and its delays since the last time."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    found: dict[str, Any] = await told(process)
    return found


def serve_stock(model: Path, port: str) -> None:
    """Become vLLM's own server with the engine's settings. Its children inherit the cores."""
    vllm = settings(model).generation.vllm
    # The server has its core in a process of its own.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", port),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "129"),
        *("--max-num-seqs", str(vllm.max_num_seqs)),
        *("--max-num-batched-tokens", str(vllm.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(vllm.kv_cache_mb << 20)),
        *("--structured-outputs-config.backend", "xgrammar", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs", "--disable-log-stats"),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]
    os.execv(sys.executable, [sys.executable, *arguments])


def all_cores() -> list[int]:
    """Return the cores of this process."""
    return sorted(os.sched_getaffinity(0))


@contextlib.asynccontextmanager
async def child(*arguments: Any, cores: list[int]) -> AsyncIterator[Any]:
    """Start a process of this module; it exits when its standard input is closed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.agents.agents_processes", *map(str, arguments)),
        *("--cores", *map(str, cores)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        limit=1 << 24,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["engine", "gateway", "stock"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("more", nargs="+")
    parser.add_argument("--cores", nargs="+", type=int)
    given = parser.parse_args()
    if given.kind == "engine":
        prepare_environment(settings(given.folder), given.cores)
        asyncio.run(engine(given.folder, *given.more))
    elif given.kind == "stock":
        prepare_environment(settings(given.folder), given.cores)
        serve_stock(given.folder / "model", *given.more)
    else:
        os.sched_setaffinity(0, given.cores)
        asyncio.run(gateway(given.folder, given.more[0], int(given.more[1])))


if __name__ == "__main__":
    main()
