"""Compare the groups per second of the buffer with those of plain SQLite on this machine's disk.

The cost of a complete group in the buffer's process: decode the request, check the group, change
the state, store, wait for the commit, encode the reply; all but the sockets. A step's groups come
from 64 senders at once. Plain SQLite inserts the same bytes in transactions of 32. Both alternate,
so that they run under the same load of the machine. The second half is the same in the store of a
run that has trained a million groups.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import Store
from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core import codec
from async_rl.core.heads import pack_group
from async_rl.core.types import (
    CodeProblem,
    Group,
    Prompt,
    Purpose,
    Sampling,
    Score,
    Ticket,
    Trajectory,
    Verdict,
)
from async_rl.data.prompt_file import PromptOrder, RunPrompts
from async_rl.processes.buffer import OBJECTS_PER_COLLECTION
from async_rl.protocol.buffer import CommitStep, PutGroup, RequestWork, TakeBatch
from async_rl.wire.rpc import Handlers
from benchmarks.figures import figure

GROUP_SIZE = 8
BATCH = 16
ROUNDS = 5
SENDERS = 64
TRANSACTION = 32
OLD_GROUPS = 1_000_000
# No group of a run repeats a prompt.
NUM_PROMPTS = 1 << 20
# Tokens of a sample, groups of a step, and the goals: groups per second, share of plain SQLite.
SIZES = ((90, 4096, "> 4000", ""), (115, 4096, "", ">= 0.5"), (1000, 2048, "", ">= 0.8"))


def _prompt(index: int) -> Prompt:
    return Prompt(
        prompt_id=f"p{index}",
        text="text",
        token_ids=np.zeros(16, np.int32),
        data_source="bench",
        problem=CodeProblem(tests=[]),
    )


def _prompts() -> RunPrompts:
    order = PromptOrder(0, NUM_PROMPTS, shuffle=False)
    return RunPrompts(train=_prompt, order=order, held_out=(), vocabulary_size=100_000)


def _config() -> RunConfig:
    base = compose_unchecked("ppo_code")
    return replace(
        base,
        num_steps=1_000_000,
        buffer=replace(base.buffer, groups_per_step=BATCH, max_staleness_versions=2),
        generation=replace(base.generation, group_size=GROUP_SIZE),
    )


def _group(ticket: Ticket, num_tokens: int) -> Group:
    rng = np.random.default_rng(ticket.group_id)
    is_prompt = np.arange(num_tokens) < 16
    written = rng.integers(0, 50_000, num_tokens, dtype=np.int32)
    trajectories = [
        Trajectory(
            token_ids=np.where(is_prompt, np.int32(0), written),
            prompt_length=16,
            loss_mask=~is_prompt,
            behavior_logprobs=-rng.random(num_tokens, dtype=np.float32),
            versions=np.where(is_prompt, -1, ticket.admitted_version).astype(np.int32),
            is_truncated=False,
            score=Score(reward=1.0, parts={}, verdicts=(Verdict.PASS,) * 8, latency_s=0.01),
        )
        for _ in range(GROUP_SIZE)
    ]
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        prompt_id=ticket.prompt.prompt_id,
        purpose=ticket.purpose,
        data_source="bench",
        generator="g",
        admitted_version=ticket.admitted_version,
        trajectories=trajectories,
        generation_s=1.0,
    )


class _Step:
    """One service whose generators put the groups of a step, which the learner then trains."""

    def __init__(self, service: BufferService, version: int) -> None:
        self._service = service
        self._answer = Handlers(service.handlers()).answer
        self._version = version
        self.put_s: list[float] = []

    async def requests(self, num_groups: int, num_tokens: int) -> list[bytes]:
        """Return the encoded requests of the step."""
        request = RequestWork(
            generator="g", incarnation="a", version=self._version, credit=num_groups, wait_s=0.0
        )
        tickets = (await self._service.request_work(request)).tickets  # type: ignore[attr-defined]
        groups = (_group(ticket, num_tokens) for ticket in tickets)
        return [codec.encode(PutGroup(payload=memoryview(pack_group(group)))) for group in groups]

    async def put(self, requests: list[bytes], rate: float | None = None) -> float:
        """Return the seconds for all requests; rate: of their arrival per second, or at once."""
        started = time.perf_counter()
        waiting = iter(enumerate(requests))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(self._send(waiting, started, rate))
        return time.perf_counter() - started

    async def _send(
        self, waiting: Iterator[tuple[int, bytes]], started: float, rate: float | None
    ) -> None:
        for number, request in waiting:
            if rate is not None:
                await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            asked = time.perf_counter()
            await self._answer(request)
            self.put_s.append(time.perf_counter() - asked)

    async def train(self) -> None:
        """Take and commit the step."""
        batch = await self._service.take_batch(TakeBatch(train_version=self._version, wait_s=1.0))
        ids = [group.group_id for group in batch.groups]  # type: ignore[attr-defined]
        self._version += 1
        await self._service.commit_step(CommitStep(version=self._version, group_ids=ids))


def _plain(path: Path, payloads: list[memoryview]) -> float:
    """Return the seconds that SQLite needs to insert these bytes."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA page_size=16384")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=normal")
    connection.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, payload BLOB)")
    started = time.perf_counter()
    for first in range(0, len(payloads), TRANSACTION):
        rows = [(payload,) for payload in payloads[first : first + TRANSACTION]]
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO blobs (payload) VALUES (?)", rows)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return seconds


def _age(path: Path, num_groups: int) -> None:
    """Multiply the rows of the one step in the store, without its trajectories."""
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("BEGIN")
        connection.execute("DELETE FROM blobs")
        count = connection.execute("SELECT count(*) FROM groups").fetchone()[0]
        copies = (
            "WITH RECURSIVE copy (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copy WHERE n <"
            f" {num_groups // count})"
        )
        for table, ids in (
            ("groups", {"group_id": count, "position": count, "train_version": 1}),
            ("transitions", {"group_id": count, "transition_id": 4 * count}),
            ("trained", {"group_id": count, "step_id": 1}),
            ("steps", {"version": 1, "step_id": 1}),
        ):
            rows = connection.execute(f"SELECT name FROM pragma_table_info('{table}')")
            values = [f"{name} + n * {ids[name]}" if name in ids else name for (name,) in rows]
            copied = f"{copies} SELECT {', '.join(values)} FROM {table}, copy"
            connection.execute(f"INSERT INTO {table} {copied}")
        connection.execute("INSERT INTO meta SELECT 'forgotten_before', max(version) FROM steps")
        connection.execute("COMMIT")
    connection.close()


def _config_of(num_groups: int) -> RunConfig:
    config = _config()
    buffer = replace(config.buffer, groups_per_step=num_groups, max_staleness_versions=0)
    return replace(config, buffer=buffer)


async def _measure(directory: Path, size: tuple[int, int, str, str], num_old: int) -> None:
    num_tokens, num_groups, goal, share_goal = size
    config = _config_of(num_groups)
    rows = []
    path = directory / "store.sqlite"
    if num_old:
        async with Store(directory, clock=time.time) as store:
            service = BufferService(config, _prompts(), store, clock=time.monotonic)
            step = _Step(service, 0)
            await step.put(await step.requests(num_groups, 32))
            await step.train()
        _age(path, num_old)
    async with Store(directory, clock=time.time) as store:
        service = BufferService(config, _prompts(), store, clock=time.monotonic)
        version = service.state.replay.learner_version
        for round_ in range(ROUNDS):
            step = _Step(service, version + round_)
            requests = await step.requests(num_groups, num_tokens)
            payloads = [codec.decode(request, PutGroup).payload for request in requests]
            half = num_groups // 2
            cpu_s = time.process_time()
            seconds = await step.put(requests[:half])
            cpu_s = time.process_time() - cpu_s
            # The other half of the step at half the rate, for the latency.
            step.put_s.clear()
            await step.put(requests[half:], rate=half / seconds / 2)
            await step.train()
            plain_s = _plain(directory / f"plain-{round_}.sqlite", payloads[:half])
            latency_s = statistics.quantiles(step.put_s, n=100)[98]
            rates = half / seconds, half / plain_s, plain_s / seconds
            rows.append((*rates, cpu_s / half, latency_s))
    groups_s, plain, share, cpu_s, latency_s = map(statistics.median, zip(*rows, strict=True))
    name = f"{len(payloads[0]) / 1000:.1f} kB, {num_old or 'no'} old groups"
    figure(f"{name}: groups", groups_s, "1/s", goal=goal)
    figure(f"{name}: plain SQLite", plain, "1/s")
    figure(f"{name}: share of plain SQLite", share, "", goal=share_goal)
    figure(f"{name}: CPU per group", cpu_s * 1e3, "ms")
    figure(f"{name}: latency p99 at half the rate", latency_s * 1e3, "ms", goal="< 50")


async def _recovery(directory: Path, num_groups: int) -> None:
    """Measure how long a buffer needs to restart with num_groups stored groups."""
    config = _config_of(num_groups)
    async with Store(directory, clock=time.time) as store:
        service = BufferService(config, _prompts(), store, clock=time.monotonic)
        request = RequestWork(
            generator="g", incarnation="a", version=0, credit=num_groups, wait_s=0.0
        )
        for ticket in (await service.request_work(request)).tickets:  # type: ignore[attr-defined]
            payload = memoryview(pack_group(_group(ticket, 64)))
            await service.put_group(PutGroup(payload=payload))
    started = time.perf_counter()
    async with Store(directory, clock=time.time) as store:
        BufferService(config, _prompts(), store, clock=time.monotonic)
        figure(f"recovery with {num_groups} groups", time.perf_counter() - started, "s", goal="< 2")


def _ticket() -> Ticket:
    return Ticket(
        group_id=0,
        attempt=1,
        purpose=Purpose.TRAIN,
        prompt=_prompt(0),
        num_samples=GROUP_SIZE,
        sampling=Sampling(temperature=1.0, max_new_tokens=1),
        admitted_version=0,
    )


def main() -> None:
    """Measure all sizes on the disk of the working directory."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    for num_old in (0, OLD_GROUPS):
        for size in SIZES:
            with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=Path.cwd()) as directory:
                asyncio.run(_measure(Path(directory), size, num_old))
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=Path.cwd()) as directory:
        asyncio.run(_recovery(Path(directory), 10_000))


if __name__ == "__main__":
    main()
