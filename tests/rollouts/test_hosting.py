"""A policy on another run's generators: both sides over real sockets, with scripted engines."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from composing import compose

from async_rl.core.errors import AsyncRLError, EngineDead, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, IntArray, Sampling
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message, message_schema
from async_rl.protocol.generator import (
    Complete,
    Completion,
    Leave,
    LoadReport,
    LoadWeights,
    Logprobs,
    Probe,
    Visit,
)
from async_rl.protocol.membership import Member, Members, WatchMembers
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.rollouts.hosted import HostedEngine
from async_rl.rollouts.hosting import Hosting
from async_rl.runtime.context import Control
from async_rl.supervision.guests import Guests
from async_rl.wire.keys import create_keys
from async_rl.wire.rpc import RpcServer

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)
MANIFEST = Manifest(version=5, path="", tensors=[], total_bytes=0, checksum=0)
FILE = StoredFile(url="file:///adapter_5", scaling=2.0)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")


class Policy:
    """Writes its own number; waits for `may_answer` first."""

    def __init__(self, number: int, may_answer: asyncio.Event) -> None:
        self.number, self.may_answer = number, may_answer
        self.version = NO_VERSION
        self.error: AsyncRLError | None = None
        self.requests: list[str] = []

    def clear(self) -> None:
        self.version = NO_VERSION

    async def load_weights(self, manifest: Manifest, source: object) -> LoadReport:
        assert source == FILE
        if self.error:
            raise self.error
        self.version = manifest.version
        return LoadReport(version=manifest.version, load_s=0.2, pause_s=0.1)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        assert num_samples == 1
        assert sampling == SAMPLING
        self.requests.append(request_id)
        await self.may_answer.wait()
        if self.error:
            raise self.error
        ids = np.array([*prompt_token_ids, self.number], np.int32)
        yield Completion(
            index=0,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            is_truncated=True,
        )

    async def logprobs(self, rows: Sequence[IntArray]) -> list[Any]:
        return [np.full(len(row), -self.number, np.float32) for row in rows]


class HostEngine(Policy):
    """Two slots for other runs."""

    def __init__(self, may_answer: asyncio.Event, first: int) -> None:
        super().__init__(0, may_answer)
        self.places = [Policy(first + i, may_answer) for i in range(2)]


class Host:
    """A run with generators: its control socket, and a server for each generator."""

    def __init__(self, run_dir: Path, stack: AsyncExitStack) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        self._stack = stack
        self._keys = create_keys(run_dir / "keys")
        self._members: dict[str, Member] = {}
        self.guests = Guests(time.monotonic, within_s=60)
        self._revision = 0
        self._changed = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.engines: list[HostEngine] = []
        self.contexts: list[Any] = []

    async def open(self) -> None:
        address = await self._serve({WatchMembers: self._watch, **self.guests.handlers()})
        control = Control(
            address=address,
            pid=os.getpid(),
            machine=platform.node(),
            model_path="",
            messages=message_schema(),
        )
        (self.run_dir / "control.json").write_bytes(msgspec.json.encode(control))

    async def _watch(self, request: WatchMembers) -> Message:
        while self._revision == request.known_revision:
            self._changed.clear()
            await self._changed.wait()
        return Members(revision=self._revision, members=list(self._members.values()))

    async def _serve(self, handlers: Any) -> str:
        server = self._stack.enter_context(RpcServer("127.0.0.1", 0, self._keys, handlers))
        task = asyncio.create_task(server.serve(), name="server")
        self._stack.callback(task.cancel)
        return server.address

    async def add(self) -> None:
        """One more generator."""
        number = len(self.engines)
        engine = HostEngine(self.may_answer, 100 * (number + 1))
        context: Any = SimpleNamespace(
            name=f"generator-{number}",
            run_dir=self.run_dir,
            activity=Activity(),
            config=compose("grpo_code", ["model.lora=lora", "model.lora.slots=3"]),
        )
        host = Hosting(context, SimpleNamespace(engine=engine))  # type: ignore[arg-type]

        async def probe(request: Probe) -> Message:
            policy = host.engine(request.policy)
            return Logprobs(version=policy.version, rows=await policy.logprobs(request.rows))

        handlers = {
            **host.handlers(),
            Complete: host.complete,
            LoadWeights: host.load,
            Probe: probe,
        }
        address = await self._serve(handlers)
        self.engines.append(engine)
        self.contexts.append((context, host))
        self._members[context.name] = Member(
            name=context.name, role="generator", pid=number + 1, address=address, state="ready",
            waits_for="", since_s=0.0, version=0, counters={},
        )  # fmt: skip
        self._publish()

    def names(self, number: int = 0) -> list[str]:
        """The policies that have a place on a generator."""
        _, hosting = self.contexts[number]
        return list(hosting._guests)

    def remove(self, name: str) -> None:
        del self._members[name]
        self._publish()

    def _publish(self) -> None:
        self._revision += 1
        self._changed.set()


@asynccontextmanager
async def a_host(tmp_path: Path, *, count: int = 1) -> AsyncIterator[Host]:
    async with AsyncExitStack() as stack:
        host = Host(tmp_path / "first", stack)
        await host.open()
        for _ in range(count):
            await host.add()
        yield host


def guest(host: Host, name: str = "generator-0") -> HostedEngine:
    config = compose("grpo_code", ["model.lora=lora", f"model.lora.host={host.run_dir}"])
    context: Any = SimpleNamespace(
        config=config,
        run_dir=Path("second"),
        name=name,
        incarnation="i",
        activity=Activity(),
        stopping=asyncio.Event(),
    )
    return HostedEngine(context)


async def samples(engine: HostedEngine, count: int = 3) -> list[Completion]:
    async with aclosing(engine.generate("7.1", [3, 4], count, SAMPLING)) as completions:
        return [done async for done in completions]


@in_a_loop
async def test_an_adapter_is_loaded_probed_and_sampled_under_its_own_name(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        engine = guest(host)
        await engine.open()
        with pytest.raises(WeightsError, match="no version of the weights yet"):
            await samples(engine)
        report = await engine.load_weights(MANIFEST, FILE)
        assert (report.version, report.pause_s, engine.version) == (5, 0.1, 5)
        done = await samples(engine)
        assert sorted(d.index for d in done) == [0, 1, 2]
        for sample in done:
            assert sample.token_ids.tolist() == [3, 4, 100]
            assert sample.versions.tolist() == [5, 5, 5]
            assert sample.logprobs.tolist() == [-0.5] * 3
            assert sample.is_truncated
        policy = host.engines[0].places[0]
        assert host.names() == ["second/generator-0/i"]
        assert len(set(policy.requests)) == 3
        [row] = await engine.logprobs([np.array([1, 2], np.int32)])
        assert row.tolist() == [-100.0, -100.0]
        assert await engine.weight_devices() == []
        await engine.close()
        assert host.names() == []


@in_a_loop
async def test_generators_of_a_run_take_different_generators_of_the_host(tmp_path: Path) -> None:
    async with a_host(tmp_path, count=2) as host:
        engines = [guest(host, f"generator-{i}") for i in range(4)]
        for engine in engines[:2]:
            await engine.open()
        assert [len(host.names(i)) for i in range(2)] == [1, 1]
        for engine in engines[2:]:
            await engine.open()
        assert [len(host.names(i)) for i in range(2)] == [2, 2]
        late = guest(host, "generator-4")
        with pytest.raises(Unavailable, match=r"taken by second/generator-[13]/i"):
            await late.open()
        for engine in (*engines, late):
            await engine.close()


@in_a_loop
async def test_a_run_waits_for_the_first_generator_of_its_host(tmp_path: Path) -> None:
    async with a_host(tmp_path, count=0) as host:
        engine = guest(host)
        opening = asyncio.create_task(engine.open())
        activity = engine._context.activity
        await until(lambda: activity.snapshot().waits_for == "a generator of run first")
        await host.add()
        await opening
        await engine.close()


@in_a_loop
async def test_the_end_of_the_generator_fails_what_is_in_flight(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        engine = guest(host)
        await engine.open()
        await engine.load_weights(MANIFEST, FILE)
        host.may_answer.clear()
        made = asyncio.create_task(samples(engine))
        await until(lambda: len(host.engines[0].places[0].requests) == 3)
        host.remove("generator-0")
        with pytest.raises(Unavailable, match=r"generator-0 .* exited before it"):
            await made
        host.may_answer.set()
        await engine.close()


@in_a_loop
async def test_a_host_that_has_forgotten_the_policy_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.rollouts.hosted._VISIT_S", 0.01)
    async with a_host(tmp_path) as host:
        engine = guest(host)
        await engine.open()
        await engine.load_weights(MANIFEST, FILE)
        _, hosting = host.contexts[0]
        hosting._guests.clear()
        for name in ("another", "third"):
            await hosting._visit(Visit(policy=name))
        await until(engine._ended.done)
        with pytest.raises(Unavailable, match=r"run first .* no longer .* taken by another"):
            await samples(engine)
        await engine.close()


@in_a_loop
async def test_visits_keep_the_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.rollouts.hosted._VISIT_S", 0.01)
    async with a_host(tmp_path) as host:
        engine = guest(host)
        await engine.open()
        host.contexts[0][1]._guests.clear()
        await until(lambda: bool(host.names()))
        await engine.close()


@in_a_loop
async def test_a_slot_is_taken_until_its_policy_leaves_or_is_silent(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        _, hosting = host.contexts[0]
        for name in ("first", "second", "first"):
            await hosting._visit(Visit(policy=name))
        first, second = hosting.engine("first"), hosting.engine("second")
        assert [first, second] == host.engines[0].places
        with pytest.raises(Unavailable, match="the 2 slots for other runs are taken by first, sec"):
            await hosting._visit(Visit(policy="third"))
        first.version = 4
        await hosting._leave(Leave(policy="first"))
        with pytest.raises(Unavailable, match="first has no slot here"):
            hosting.engine("first")
        await hosting._visit(Visit(policy="third"))
        assert hosting.engine("third") is first
        assert first.version == NO_VERSION, "a policy without an adapter generates nothing"
        hosting._guests["second"].seen_s -= 100
        await hosting._visit(Visit(policy="fourth"))
        assert hosting.engine("fourth") is second
        with pytest.raises(Unavailable, match="second has no slot here"):
            hosting.engine("second")


@in_a_loop
async def test_a_run_that_has_ended_is_named(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        engine = guest(host)
        (host.run_dir / "control.json").unlink()
        with pytest.raises(Unavailable, match="first has no processes yet"):
            await engine.open()
        await engine.close()


class Tasks:
    """The tasks of a process, whose errors end it."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def create_task(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))


@in_a_loop
async def test_only_an_error_of_the_engine_itself_ends_the_host(tmp_path: Path) -> None:
    """An adapter that is refused is the business of the run that pushed it."""
    async with a_host(tmp_path) as host:
        context, _ = host.contexts[0]
        context.group = Tasks()
        engine = guest(host)
        await engine.open()
        policy = host.engines[0].places[0]
        policy.error = WeightsError("its rank is above 8")
        with pytest.raises(WeightsError, match="its rank is above 8"):
            await engine.load_weights(MANIFEST, FILE)
        policy.error = None
        await engine.load_weights(MANIFEST, FILE)
        await samples(engine, 1)
        assert context.group.tasks == []
        policy.error = Unavailable("the vLLM engine died")
        with pytest.raises(Unavailable, match="the vLLM engine died"):
            await samples(engine, 1)
        with pytest.raises(EngineDead, match="the vLLM engine died"):
            await context.group.tasks[0]
        await engine.close()


@in_a_loop
async def test_a_row_of_a_gateway_that_the_engine_fails_ends_the_process(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        context, hosting = host.contexts[0]
        context.group = Tasks()
        engine = host.engines[0]
        row = Complete(request_id="1.1.0/0", token_ids=np.array([3], np.int32), sampling=SAMPLING)
        engine.version = 5
        done = await hosting.complete(row)
        assert done.completed.token_ids.tolist() == [3, 0]
        engine.error = Unavailable("the vLLM engine died")
        with pytest.raises(Unavailable, match="generator-0: the vLLM engine died"):
            await hosting.complete(row)
        with pytest.raises(EngineDead, match="the vLLM engine died"):
            await context.group.tasks[0]


@in_a_loop
async def test_the_supervisor_of_the_host_knows_its_guests_until_their_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A visit is always under way, also when the engine leaves.
    monkeypatch.setattr("async_rl.rollouts.hosted._VISIT_S", 0.0)
    async with a_host(tmp_path) as host:
        engine = guest(host)
        await engine.open()
        await until(lambda: host.guests.names == ["second/generator-0"])
        # Its process ends and starts again: the host has to wait for it.
        await engine.close()
        assert host.guests.names == ["second/generator-0"]
        engine = guest(host)
        await engine.open()
        engine._context.stopping.set()
        await engine.close()
        assert host.guests.names == []


def test_a_guest_that_is_silent_for_long_is_forgotten() -> None:
    now_s = 0.0
    guests = Guests(lambda: now_s, within_s=60)
    asyncio.run(guests._visit(Visit(policy="second/generator-0")))
    asyncio.run(guests._visit(Visit(policy="third/generator-0")))
    now_s = 40.0
    asyncio.run(guests._visit(Visit(policy="third/generator-0")))
    assert guests.names == ["second/generator-0", "third/generator-0"]
    now_s = 61.0
    assert guests.names == ["third/generator-0"]


@in_a_loop
async def test_a_run_without_slots_says_so(tmp_path: Path) -> None:
    async with a_host(tmp_path) as host:
        plain: Callable[..., Any] = type("Plain", (), {})
        _, side = host.contexts[0]
        side._sleeping = SimpleNamespace(engine=plain())
        engine = guest(host)
        with pytest.raises(Unavailable, match=r"first has model\.lora\.slots=0"):
            await engine.open()
        await engine.close()
