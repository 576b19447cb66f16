"""A live run whose generators and verifiers come and go by `async-rl scale`."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e_support import LiveRun, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = ("conf=grpo_code", "generation.engine=hf", "buffer.groups_per_step=4", "generation.group_size=4", "evaluation.every_steps=0")


def scale(run: LiveRun, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("async-rl")), "scale", str(run.run_dir), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def is_settled(run: LiveRun, **wanted: int) -> bool:
    pools: dict[str, dict[str, Any]] = run.told()["pools"]
    return all(pools[name] == {"wanted": count, "starting": 0, "live": count, "draining": 0} for name, count in wanted.items())


def test_generators_and_verifiers_come_and_go_and_the_learner_goes_on(launch: Launch) -> None:
    before = shared_memory()
    run = launch(*QUICK, "num_steps=100000", "supervisor.heartbeat_s=0.2")
    run.until(lambda: run.step >= 3, "step 3")
    for generators, verifiers in ((3, 2), (1, 1), (2, 1)):
        assert scale(run, f"generators={generators}", f"verifiers={verifiers}").returncode == 0
        run.until(lambda g=generators, v=verifiers: is_settled(run, generators=g, verifiers=v), f"{generators} generators")
        reached = run.step
        run.until(lambda r=reached: run.step >= r + 3, f"three steps with {generators} generators")
    assert msgspec.json.decode((run.run_dir / "scale.json").read_bytes()) == {"generators": 2, "verifiers": 1}
    refused = scale(run, "generator=2")
    assert refused.returncode == 2
    assert "did you mean generators?" in refused.stderr
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.terminal
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "the learner never went back"
    assert max(row["staleness/max_versions"] for row in rows) <= 2
    assert not any(row.get(f"restarts/generator-{rank}") for row in rows for rank in range(3))
    assert run.audit()["problems"] == []
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        did = dict(store.execute("SELECT generator, count(*) FROM transitions WHERE state='ready' GROUP BY generator"))
        joined = store.execute("SELECT min(version) FROM transitions WHERE state='generating' AND generator='generator-2'").fetchone()[0]
        dropped = store.execute("SELECT count(*) FROM groups WHERE state='dropped' AND reason!='over_age'").fetchone()[0]
    assert set(did) == {"generator-0", "generator-1", "generator-2"}, "everyone who joined did work"
    assert joined >= 3, "a joiner begins with the weights of the moment"
    assert dropped == 0, "who leaves loses nothing"
    assert run.processes() == []
    assert shared_memory() == before


def test_a_run_without_generators_waits_says_so_and_goes_on_when_they_come(launch: Launch) -> None:
    run = launch(*QUICK, "num_steps=4", "generators.count=0", "supervisor.stall_warning_s=3", "supervisor.heartbeat_s=0.2")
    run.until(lambda: "no generator serves" in run.status(), "status says what is missing")
    assert scale(run, "generators=1").returncode == 0
    assert run.wait() == 0, run.terminal
    assert statistics.mean(row["staleness/max_versions"] for row in run.rows) <= 2
    assert run.audit()["problems"] == []
