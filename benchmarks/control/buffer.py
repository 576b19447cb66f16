"""Compare the throughput of the buffer on this machine's disk with plain SQLite.

Groups pass through put, acknowledgement, take and commit. Phases of both alternate, so that they
run under the same load of the machine. Each group has 8 trajectories; the service is called without
sockets. "in memory" is the same on a file system in memory, so without durability. "Ray" moves the
same groups between two actors through its object store.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import Store
from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core import codec
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
from async_rl.data.order import PromptOrder
from async_rl.protocol.buffer import PutGroup, RequestWork
from async_rl.protocol.learner import CommitStep, TakeBatch
from benchmarks.figures import figure

GROUP_SIZE = 8
BATCH = 16
ROUNDS = 5


class _Prompts:
    num_held_out = 0
    vocabulary_size = 100_000
    order = PromptOrder(0, 1, shuffle=False)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        return Prompt(
            prompt_id=f"p{index}",
            text="text",
            token_ids=np.zeros(16, np.int32),
            data_source="bench",
            problem=CodeProblem(tests=[]),
        )


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


class _Loop:
    """One service that processes batch after batch.

    While the learner takes and commits one batch, the generators put the next, as in a run.
    """

    def __init__(self, service: BufferService, num_tokens: int, version: int) -> None:
        self._service = service
        self._num_tokens = num_tokens
        self._version = version
        self._group_bytes = 13 * GROUP_SIZE * num_tokens
        self.put_s: list[float] = []
        self.busy_s = 0.0
        self.num_groups = 0

    @property
    def bytes_s(self) -> float:
        """Bytes of stored groups per second."""
        return self._group_bytes * self.num_groups / self.busy_s

    async def run(self, num_steps: int, rate_bytes_s: float | None = None) -> None:
        """Process num_steps batches and measure only the time in the service.

        The groups of a batch are put together, or one by one at the given rate.
        """
        await self._put_all(await self._make(), rate_bytes_s)
        for step in range(num_steps):
            groups = await self._make() if step < num_steps - 1 else []
            started = time.perf_counter()
            await asyncio.gather(self._train(), self._put_all(groups, rate_bytes_s))
            if groups:
                self.busy_s += time.perf_counter() - started
                self.num_groups += len(groups)

    async def _make(self) -> list[Group]:
        request = RequestWork(
            generator="g", incarnation="a", version=self._version, credit=BATCH, wait_s=0.0
        )
        tickets = (await self._service.request_work(request)).tickets  # type: ignore[attr-defined]
        return [_group(t, self._num_tokens) for t in tickets]

    async def _train(self) -> None:
        batch = await self._service.take_batch(TakeBatch(train_version=self._version, wait_s=1.0))
        ids = [g.group_id for g in batch.groups]  # type: ignore[attr-defined]
        self._version += 1
        await self._service.commit_step(CommitStep(version=self._version, group_ids=ids))

    async def _put_all(self, groups: list[Group], rate_bytes_s: float | None) -> None:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for i, group in enumerate(groups):
                if rate_bytes_s is not None:
                    await asyncio.sleep(
                        max(
                            0.0,
                            started + i * self._group_bytes / rate_bytes_s - time.perf_counter(),
                        )
                    )
                tasks.create_task(self._put(group))

    async def _put(self, group: Group) -> None:
        started = time.perf_counter()
        await self._service.put_group(PutGroup(group=group))
        self.put_s.append(time.perf_counter() - started)


def _plain(path: Path, durability: str, payload: bytes, num_batches: int) -> float:
    """Return the seconds that SQLite needs for the same blobs, one transaction per batch."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA page_size=16384")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={durability}")
    connection.execute("CREATE TABLE IF NOT EXISTS blobs (id INTEGER PRIMARY KEY, payload BLOB)")
    started = time.perf_counter()
    for _ in range(num_batches):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO blobs (payload) VALUES (?)", [(payload,)] * BATCH)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return seconds


async def _rate(path: Path, num_tokens: int, num_steps: int) -> float:
    """Return the maximum throughput from put to commit in bytes per second."""
    config = _config("normal")
    async with Store(path, clock=time.time) as store:
        loop = _Loop(BufferService(config, _Prompts(), store, clock=time.monotonic), num_tokens, 0)
        await loop.run(num_steps)
        return loop.bytes_s


async def _recovery(directory: Path, num_groups: int) -> None:
    """Measure how long a buffer needs to restart with num_groups stored groups."""
    config = _config("normal")
    config = replace(
        config, buffer=replace(config.buffer, groups_per_step=num_groups, max_staleness_versions=0)
    )
    path = directory / "recovery.sqlite"
    async with Store(path, clock=time.time) as store:
        service = BufferService(config, _Prompts(), store, clock=time.monotonic)
        request = RequestWork(
            generator="g", incarnation="a", version=0, credit=num_groups, wait_s=0.0
        )
        for ticket in (await service.request_work(request)).tickets:  # type: ignore[attr-defined]
            await service.put_group(PutGroup(group=_group(ticket, 64)))
    started = time.perf_counter()
    async with Store(path, clock=time.time) as store:
        BufferService(config, _Prompts(), store, clock=time.monotonic)
        figure(f"recovery with {num_groups} groups", time.perf_counter() - started, "s", goal="< 2")


def _ray_rate(num_tokens: int, num_steps: int) -> float:
    """Return bytes per second through Ray's object store.

    One actor puts, another gets, and each batch is acknowledged.
    """
    import ray

    class Source:
        def __init__(self) -> None:
            ticket = _ticket()
            self._groups = [
                msgspec.to_builtins(
                    _group(ticket, num_tokens), builtin_types=(np.ndarray,), enc_hook=lambda x: x
                )
            ] * BATCH

        def batch(self) -> list[object]:
            return [ray.put(group) for group in self._groups]

    class Sink:
        def take(self, references: list[object]) -> int:
            return len(ray.get(references))

    source, sink = ray.remote(Source).remote(), ray.remote(Sink).remote()
    ray.get(sink.take.remote(ray.get(source.batch.remote())))
    started = time.perf_counter()
    for _ in range(num_steps):
        ray.get(sink.take.remote(ray.get(source.batch.remote())))
    seconds = time.perf_counter() - started
    ray.kill(source)
    ray.kill(sink)
    return 13 * GROUP_SIZE * num_tokens * BATCH * num_steps / seconds


async def _measure(directory: Path, num_tokens: int, durability: str, num_steps: int) -> None:
    ratios, rates = [], []
    name = f"{num_tokens // 1000}k tokens, {durability}"
    for round_ in range(ROUNDS):
        path = directory / f"{num_tokens}-{durability}-{round_}"
        config = _config()
        async with Store(path.with_suffix(".sqlite"), clock=time.time) as store:
            store._connection.execute(f"PRAGMA synchronous={durability}")
            service = BufferService(config, _Prompts(), store, clock=time.monotonic)
            loop = _Loop(service, num_tokens, 0)
            await loop.run(num_steps)
            rate = loop.bytes_s
            paced = _Loop(service, num_tokens, num_steps)
            await paced.run(num_steps, rate / 2)
        payload = _payload(num_tokens)
        plain = (
            len(payload)
            * num_steps
            * BATCH
            / _plain(path.with_suffix(".plain"), durability, payload, num_steps)
        )
        rates.append(
            (
                rate,
                loop.num_groups / loop.busy_s,
                plain,
                statistics.quantiles(paced.put_s, n=100)[98],
            )
        )
        ratios.append(rate / plain)
        _clear(directory)
    rate, groups_s, plain, p99 = (statistics.median(column) for column in zip(*rates, strict=True))
    figure(f"{name}: put to committed", rate / 1e6, "MB/s")
    figure(f"{name}: groups", groups_s, "1/s")
    figure(f"{name}: SQLite alone", plain / 1e6, "MB/s")
    figure(f"{name}: share of SQLite alone", statistics.median(ratios), "", goal=">= 0.7")
    figure(f"{name}: put latency p99 at half load", p99 * 1e3, "ms", goal="< 50")


def _clear(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


def _payload(num_tokens: int) -> bytes:
    """Return one group as the store encodes it."""
    return codec.encode(_group(_ticket(), num_tokens))


def _ticket() -> Ticket:
    return Ticket(
        group_id=0,
        attempt=1,
        purpose=Purpose.TRAIN,
        prompt=_Prompts().prompt(Purpose.TRAIN, 0),
        num_samples=GROUP_SIZE,
        sampling=Sampling(temperature=1.0, max_new_tokens=1),
        admitted_version=0,
    )


def main() -> None:
    """Measure all sizes and both durabilities on the disk of the working directory."""
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=Path.cwd()) as directory:
        for num_tokens, num_steps in ((1000, 80), (8000, 10)):
            for durability in ("normal", "full"):
                asyncio.run(_measure(Path(directory), num_tokens, durability, num_steps))
        asyncio.run(_recovery(Path(directory), 10_000))
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir="/dev/shm") as directory:
        for num_tokens, num_steps in ((1000, 80), (8000, 10)):
            rate = asyncio.run(
                _rate(Path(directory) / f"{num_tokens}.sqlite", num_tokens, num_steps)
            )
            figure(f"{num_tokens // 1000}k tokens, in memory: put to committed", rate / 1e6, "MB/s")
    _measure_ray()


def _measure_ray() -> None:
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=2**29,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        for num_tokens, num_steps in ((1000, 80), (8000, 10)):
            figure(
                f"{num_tokens // 1000}k tokens, Ray's object store",
                _ray_rate(num_tokens, num_steps) / 1e6,
                "MB/s",
            )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
