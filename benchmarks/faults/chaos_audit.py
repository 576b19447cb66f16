"""The audit of benchmarks.faults.chaos: promises of a run, checked from SQLite and metrics.jsonl
alone.

It shares no code with `async-rl ledger`, so that a mistake there cannot hide a broken promise.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the store of a run, read-only."""
    path = run_dir / "store.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as store:
        yield store


def audit(run_dir: Path, *, groups_per_step: int, max_staleness: int) -> Iterator[str]:
    """Yield a sentence for each broken promise, from SQL and metrics.jsonl alone."""
    with reading(run_dir) as store:
        if store.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            yield "the store is damaged"
        versions = [v for (v,) in store.execute("SELECT version FROM steps WHERE undone_s IS NULL")]
        if sorted(versions) != list(range(1, len(versions) + 1)):
            yield f"the surviving steps are {sorted(versions)}"
        trained: dict[int, list[int]] = collections.defaultdict(list)
        rows = store.execute(
            "SELECT s.version, t.group_id, g.state, g.oldest_version FROM steps s JOIN trained t"
            " USING (step_id) JOIN groups g USING (group_id) WHERE s.undone_s IS NULL"
        ).fetchall()
        for version, group_id, state, oldest in rows:
            trained[group_id].append(version)
            if state != "trained":
                yield f"group {group_id} was trained by step {version} and is {state}"
            if oldest is not None and version - 1 - oldest > max_staleness:
                yield f"step {version} trained group {group_id} with tokens of version {oldest}"
        for group_id, steps in trained.items():
            if len(steps) > 1:
                yield f"group {group_id} was trained by the steps {steps}"
        sizes = collections.Counter(version for version, *_ in rows)
        for version in versions:
            if sizes[version] != groups_per_step:
                yield f"step {version} trained {sizes[version]} groups"
        states = dict(store.execute("SELECT group_id, state FROM groups"))
        for group_id, state in states.items():
            if state == "trained" and group_id not in trained:
                yield f"group {group_id} is trained by no surviving step"
        positions = [
            p for (p,) in store.execute("SELECT position FROM groups WHERE purpose='train'")
        ]
        if set(positions) != set(range(len(set(positions)))):
            yield "positions in the order of prompts are missing"
        nameless = "SELECT count(*) FROM groups WHERE state='dropped' AND reason=''"
        if store.execute(nameless).fetchone()[0]:
            yield "groups were dropped without a reason"
        outage = "SELECT count(*) FROM groups WHERE state='dropped' AND reason='scoring_outage'"
        lost = store.execute(outage).fetchone()[0]
        if lost:
            yield f"{lost} prompts were lost to an outage of the reward server"
    yield from _audit_metrics(run_dir, len(versions), max_staleness)


def _audit_metrics(run_dir: Path, num_steps: int, max_staleness: int) -> Iterator[str]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["step"] > 0]
    if steps != list(range(1, num_steps + 1)):
        yield f"metrics.jsonl has {len(steps)} steps, the store {num_steps}"
    for row in rows:
        if row.get("staleness/max_versions", 0) > max_staleness:
            yield f"step {row['step']} reports a staleness of {row['staleness/max_versions']}"
        loss = row.get("loss/policy", 0.0)
        if loss is None or not math.isfinite(loss):
            yield f"step {row['step']} has the loss {loss}"


def leftovers(run_dir: Path) -> list[str]:
    """Return the processes that still name the run."""
    return [
        f"process {process.pid}"
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid() and str(run_dir) in " ".join(process.info["cmdline"] or [])
    ]
