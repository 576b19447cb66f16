"""Generators and verifiers that come and go while a run trains, with the transformers engine; and two runs side by side."""

import contextlib
import re
import sqlite3
import statistics
import subprocess
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun, async_rl, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "supervisor.heartbeat_s=0.2",
)


def scaled(run: LiveRun, *words: str) -> subprocess.CompletedProcess[str]:
    return async_rl("scale", str(run.run_dir), *words)


def is_at(run: LiveRun, pool: str, count: int) -> bool:
    """Whether the pool has as many as wanted, and nobody who comes or goes."""
    found = next((p for p in run.told().get("pools", []) if p["pool"] == pool), None)
    return found is not None and (found["wanted"], found["live"], found["starting"], found["draining"]) == (count, count, 0, 0)


def test_generators_and_verifiers_come_and_go_while_the_learner_keeps_stepping(launch: Launch) -> None:
    run = launch(*QUICK, "num_steps=100000")
    run.until(lambda: run.step >= 5, "step 5")
    learner, first = run.pid_of("learner-0"), run.step
    for generators, verifiers in ((3, 2), (1, 1), (2, 1)):
        done = scaled(run, f"generators={generators}", f"verifiers={verifiers}")
        assert done.returncode == 0, done.stderr
        assert f"generators: wanted {generators}; now live" in done.stdout
        run.until(lambda count=generators: is_at(run, "generators", count), f"{generators} generators")
        run.until(lambda count=verifiers: is_at(run, "verifiers", count), f"{verifiers} verifiers")
        at = run.step
        run.until(lambda at=at: run.step >= at + 4, "four more steps")
    wrong = scaled(run, "generator=2")
    refusal = "error: generator=2: there is no such pool; did you mean generators? this run has generators, verifiers\n"
    assert (wrong.returncode, wrong.stderr) == (2, refusal)
    assert run.pid_of("learner-0") == learner
    assert async_rl("stop", str(run.run_dir)).returncode == 0
    assert run.wait() == 0, run.terminal
    assert run.processes() == []
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    # One step may wait for a machine that starts two engines beside it; a learner that stood still for them would take longer by far.
    steps_s = [row["time/step_s"] for row in rows if row["step"] > first]
    assert max(steps_s) < max(10.0, 20 * statistics.median(steps_s)), sorted(steps_s)[-5:]
    assert max(row["staleness/max_versions"] for row in rows) <= 2
    assert {row["scale/generators_wanted"] for row in rows} == {1, 2, 3}
    assert run.audit()["problems"] == []
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        workers = {name for (name,) in store.execute("SELECT DISTINCT generator FROM groups WHERE state='trained'")}
        dropped = store.execute("SELECT count(*) FROM transitions WHERE state='dropped'").fetchone()
    assert {"generator-0", "generator-1"} <= workers <= {"generator-0", "generator-1", "generator-2"}
    assert dropped == (0,)
    log = (run.run_dir / "logs" / "supervisor.log").read_text()
    assert len(re.findall(r"(?:generator|verifier)-\d has left", log)) == 3
    assert "again in" not in log, "nobody who left was taken for lost"


def test_a_run_without_generators_waits_says_so_and_goes_on_beside_another_run(launch: Launch) -> None:
    before = shared_memory()
    run = launch(*QUICK, "num_steps=12", "generators.count=0")
    beside = launch(*QUICK, "num_steps=12", "generators.count=1", name="beside")
    run.until(lambda: "generators: 0 wanted, 0 live (async-rl scale generators=1 goes on)" in run.status(), "status says what is missing")
    assert scaled(run, "generators=1").returncode == 0
    assert [one.wait() for one in (run, beside)] == [0, 0], run.terminal + beside.terminal
    for one in (run, beside):
        assert [row["step"] for row in one.rows] == list(range(1, 13))
        assert one.audit()["problems"] == []
        assert one.processes() == []
    assert shared_memory() == before
