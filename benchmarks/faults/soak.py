"""Show that neither time nor memory of a step depends on the length of the run.

    python -m benchmarks.faults.soak

Buffer, store and metrics writer are the product's own; generators and learner are simulated by
calls of the buffer's handlers, with short sequences. Two runs are compared in turn, each in a
separate process: a fresh one, and one with the files of a run after 100,000 steps and 10
million groups. Its store is written hundred steps at a time, with dropped groups and evaluations,
and compacted by the product's own statements, which takes minutes. Growth of these files appears as
a difference between the two runs, growth of a process's memory as the slope within each. More
groups are trained than rows are kept, so that compaction and deletion are in their steady state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.store import COMPACTION, Store
from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.heads import pack_group
from async_rl.core.types import CodeProblem, Group, Prompt, Score, Ticket, Trajectory
from async_rl.data.prompt_file import PromptOrder, RunPrompts
from async_rl.monitoring.recorder import Recorder
from async_rl.observability.catalogue import METRICS
from async_rl.protocol.buffer import (
    CommitStep,
    ForgetBefore,
    PutGroup,
    ReadSequences,
    RequestWork,
    SecureStore,
    SyncVersion,
    TakeBatch,
)
from async_rl.protocol.supervisor import ReportMetrics

BATCH, SAMPLES, TOKENS, PROMPT = 8, 2, 64, 16
CHECKPOINT_STEPS = 10
OLD_STEPS, OLD_BATCH = 100_000, 100
# Group ids of a step: trained groups, two dropped groups, and the groups of an evaluation.
OLD_IDS = 110
AT_ONCE = 100  # steps of one compaction, as between two checkpoints
WINDOWS = 6
_NAMES = [
    name
    for name, spec in METRICS.items()
    if spec.unit != "text" and "<" not in name and not name.startswith("eval/")
]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run: medians of the CPU time of a step in all threads, in milliseconds, which
    other work on the machine changes less than the time of the clock; memory and file at its end.
    """

    buffer_ms: float
    metrics_ms: float
    rss_mb: float
    store_mb: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. start_s: of buffer and metrics writer; return_s: of a learner that
    goes back by two steps; count_s: the scan of all rows that a start made before.
    """

    start_s: float
    return_s: float
    count_s: float
    windows: list[Window]


def _prompt(index: int) -> Prompt:
    return Prompt(
        prompt_id=f"p{index}",
        text="text",
        token_ids=np.zeros(PROMPT, np.int32),
        data_source="bench",
        problem=CodeProblem(tests=[]),
    )


def _prompts() -> RunPrompts:
    """Ten thousand prompts, again and again."""
    order = PromptOrder(0, 10_000, shuffle=False)
    return RunPrompts(train=_prompt, order=order, held_out=(), vocabulary_size=50_000)


def _config(run_dir: Path) -> RunConfig:
    base = compose_unchecked("grpo_code", [f"output_dir={run_dir}"])
    return replace(
        base,
        num_steps=10**6,
        buffer=replace(base.buffer, groups_per_step=BATCH, max_staleness_versions=2),
        generation=replace(base.generation, group_size=SAMPLES),
        evaluation=replace(base.evaluation, every_steps=0),
    )


def _group(ticket: Ticket) -> Group:
    written = np.arange(TOKENS) >= PROMPT
    sample = Trajectory(
        token_ids=np.arange(TOKENS, dtype=np.int32) * written.astype(np.int32),
        prompt_length=PROMPT,
        loss_mask=written,
        behavior_logprobs=np.where(written, np.float32(-0.5), np.float32(0)),
        versions=np.where(written, np.int32(ticket.admitted_version), np.int32(-1)),
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(), latency_s=0.01),
    )
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        prompt_id=ticket.prompt.prompt_id,
        purpose=ticket.purpose,
        data_source="bench",
        generator="generator-0",
        admitted_version=ticket.admitted_version,
        trajectories=[sample] * SAMPLES,
        generation_s=1.0,
    )


class _Run:
    """The simulated generators and learner of one run."""

    def __init__(self, service: BufferService, recorder: Recorder, version: int) -> None:
        self._service = service
        self._recorder = recorder
        self.version = version
        self.life = 0
        self.buffer_s: list[float] = []
        self.metrics_s: list[float] = []

    async def sync(self, version: int) -> None:
        """A learner starts at this version."""
        request = SyncVersion(version=version, incarnation=f"life at {time.monotonic()}")
        self.life = (await self._service.sync_version(request)).life  # type: ignore[attr-defined]
        self._recorder.start_from(version)
        self.version = version

    async def step(self) -> None:
        """Generate, store, take, read, train and report one batch."""
        service, life = self._service, self.life
        started = time.process_time()
        work = await service.request_work(
            RequestWork(
                generator="generator-0",
                incarnation="a",
                version=self.version,
                credit=BATCH,
                wait_s=1.0,
            )
        )
        for ticket in work.tickets:  # type: ignore[attr-defined]
            await service.put_group(PutGroup(payload=memoryview(pack_group(_group(ticket)))))
        taken = await service.take_batch(
            TakeBatch(life=life, train_version=self.version, wait_s=1.0)
        )
        ids = [head.group_id for head in taken.groups]  # type: ignore[attr-defined]
        samples = [(name, n) for name in ids for n in range(SAMPLES)]
        await service.read_sequences(
            ReadSequences(life=life, train_version=self.version, samples=samples)
        )
        self.version += 1
        await service.commit_step(CommitStep(life=life, version=self.version, group_ids=ids))
        if self.version % CHECKPOINT_STEPS == 0:
            await service.secure_store(SecureStore(life=life))
            await service.forget_before(ForgetBefore(life=life, version=self.version))
        self.buffer_s.append(time.process_time() - started)
        started = time.process_time()
        scalars = {name: random.random() for name in _NAMES}
        self._recorder.record(
            ReportMetrics(
                source="learner-0",
                step=self.version,
                scalars={**scalars, "reward/mean": 0.5},
            )
        )
        self.metrics_s.append(time.process_time() - started)


async def _measure(run_dir: Path, *, version: int, num_steps: int, keep_groups: int) -> Figures:
    config, path = _config(run_dir), run_dir / STORE_FILE
    count_s = 0.0
    if path.exists():
        with contextlib.closing(sqlite3.connect(path)) as connection:
            started = time.perf_counter()
            connection.execute(
                "SELECT state, reason, count(*) FROM groups GROUP BY 1, 2"
            ).fetchall()
            count_s = time.perf_counter() - started
    process = psutil.Process()
    started = time.perf_counter()
    async with Store(run_dir, clock=time.time) as store:
        service = BufferService(
            config, _prompts(), store, clock=time.monotonic, kept_groups=keep_groups
        )
        recorder = Recorder(run_dir, config)
        run = _Run(service, recorder, version)
        await run.sync(version)
        start_s = time.perf_counter() - started
        windows = []
        for _ in range(WINDOWS):
            first = len(run.buffer_s)
            for _ in range(num_steps // WINDOWS):
                await run.step()
            windows.append(
                Window(
                    buffer_ms=1000 * statistics.median(run.buffer_s[first:]),
                    metrics_ms=1000 * statistics.median(run.metrics_s[first:]),
                    rss_mb=process.memory_info().rss / 2**20,
                    store_mb=path.stat().st_size / 2**20,
                )
            )
        started = time.perf_counter()
        await run.sync(run.version - 2)
        return_s = time.perf_counter() - started
        recorder.close()
    return Figures(start_s=start_s, return_s=return_s, count_s=count_s, windows=windows)


def _age(run_dir: Path, keep_groups: int) -> None:
    """Write the files of a run after OLD_STEPS steps of OLD_BATCH groups."""
    kept_from = OLD_STEPS - keep_groups // OLD_BATCH
    with contextlib.closing(sqlite3.connect(run_dir / STORE_FILE, isolation_level=None)) as store:
        store.execute("PRAGMA synchronous=OFF")
        for first in range(0, OLD_STEPS, AT_ONCE):
            last = first + AT_ONCE
            store.execute("BEGIN")
            for statement in _OLD_ROWS:
                store.execute(statement, {"first": first, "last": last})
            if last <= kept_from:
                for statement in COMPACTION:
                    store.execute(statement, {"first": first, "last": last})
            store.execute("COMMIT")
        store.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten_before', ?)", (OLD_STEPS,))
    scalars = {name: random.random() for name in _NAMES}
    with (run_dir / "metrics.jsonl").open("wb") as file:
        for step in range(1, OLD_STEPS + 1):
            row = {"step": step, "time_s": step * 13.0, "reward/mean": 0.5, **scalars}
            file.write(msgspec.json.encode(row) + b"\n")


def _old_rows(purpose: str, state: str, version: str, number: str, reason: str) -> tuple[str, str]:
    """Statements for the groups of the steps after :first up to :last, and for their transitions.

    version, number: SQL for the version before the step, and for the number within it.
    """
    counted = (
        f"WITH RECURSIVE n(i) AS (SELECT :first * {OLD_IDS} UNION ALL SELECT i + 1 FROM n WHERE"
        f" i + 1 < :last * {OLD_IDS}) SELECT i, i / {OLD_IDS} AS v FROM n WHERE {number}"
    )
    groups = (
        "INSERT INTO groups (group_id, purpose, prompt_id, position, evaluation, num_samples,"
        " state, attempt, generator, incarnation, version, train_version, oldest_version,"
        " newest_version, num_tokens, num_trained_tokens, reward_mean, rewards, parts, reason,"
        f" admitted_s, changed_s) SELECT i, '{purpose}', 'p' || (i % 10000), i, {version}, 2,"
        f" '{state}', 1, 'generator-' || (i % 1024), 'a', v, iif('{state}' = 'trained', v, NULL),"
        f" v, v, 128, 96, 0.5, '[0.0,1.0]', '{{}}', '{reason}', 0, 0 FROM ({counted})"
    )
    states = f"VALUES ('generating'), ('ready'), ('leased'), ('{state}')"
    transitions = (
        "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
        f" SELECT i, 1, column1, 0, 'generator-0', v, '' FROM ({counted}), ({states})"
    )
    return groups, transitions


_OLD_ROWS = [
    "WITH RECURSIVE n(v) AS (SELECT :first + 1 UNION ALL SELECT v + 1 FROM n WHERE v < :last)"
    " INSERT INTO steps (version, committed_s) SELECT v, 0 FROM n",
    *_old_rows("train", "trained", "NULL", f"i % {OLD_IDS} < {OLD_BATCH}", ""),
    *_old_rows("train", "dropped", "NULL", f"i % {OLD_IDS} IN (100, 101)", "over_age"),
    # Eight held-out prompts every hundred steps, answered and reported.
    *_old_rows("eval", "ready", "v", f"i % {OLD_IDS} > 101 AND v % 100 = 50", ""),
    "INSERT INTO evaluations SELECT DISTINCT evaluation, 8, 0, 0, '{}' FROM groups"
    " WHERE evaluation >= :first AND evaluation < :last",
    "INSERT INTO trained SELECT group_id, step_id FROM groups JOIN steps ON steps.version ="
    " train_version + 1 WHERE train_version >= :first AND train_version < :last",
]
"""Rows of the steps after :first up to :last, as they are before compaction."""


def _child(run_dir: Path, arguments: argparse.Namespace) -> None:
    """Measure one run in this process."""
    version = OLD_STEPS if arguments.phase == "aged" else 0
    figures = asyncio.run(
        _measure(
            run_dir,
            version=version,
            num_steps=arguments.steps,
            keep_groups=arguments.keep_groups,
        )
    )
    sys.stdout.buffer.write(msgspec.json.encode(figures))


def main() -> None:
    """Compare a fresh run with one of 100,000 steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--keep-groups", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=2, help="a fresh and an aged run in turn")
    parser.add_argument("--aged", type=Path, help="keep the aged files there, or use those there")
    parser.add_argument("--phase", default="")
    parser.add_argument("--run-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    if arguments.phase:
        _child(arguments.run_dir, arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        aged = arguments.aged or Path(scratch) / "original"
        started = time.perf_counter()
        if not aged.exists():
            aged.mkdir()
            asyncio.run(_empty_store(aged))
            _age(aged, arguments.keep_groups)
        size = os.path.getsize(aged / "metrics.jsonl") / 2**20
        print(
            f"aged in {time.perf_counter() - started:.0f} s: {OLD_STEPS} steps,"
            f" {OLD_STEPS * OLD_BATCH} trained groups, metrics {size:.0f} MB",
            flush=True,
        )
        for number in range(2 * arguments.pairs):
            phase = ("fresh", "aged")[number % 2]
            run_dir = Path(scratch) / phase
            if phase == "aged":
                shutil.copytree(aged, run_dir)
            else:
                run_dir.mkdir()
            command = [sys.executable, "-m", "benchmarks.faults.soak", "--phase", phase]
            command += ["--run-dir", str(run_dir), "--steps", str(arguments.steps)]
            command += ["--keep-groups", str(arguments.keep_groups)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            _show(phase, msgspec.json.decode(done.stdout, type=Figures))
            shutil.rmtree(run_dir)


async def _empty_store(run_dir: Path) -> None:
    async with Store(run_dir, clock=time.time):
        pass


def _show(phase: str, figures: Figures) -> None:
    print(
        f"{phase}: start {figures.start_s:.2f} s (a scan of the rows {figures.count_s:.3f} s),"
        f" return of the learner {figures.return_s:.3f} s"
    )
    for window in figures.windows:
        print(
            f"  buffer {window.buffer_ms:6.2f} ms/step   metrics {window.metrics_ms:6.3f} ms/step  "
            f" memory {window.rss_mb:7.1f} MB   store {window.store_mb:7.1f} MB"
        )


if __name__ == "__main__":
    main()
