"""Generators and verifiers that come and go while a run trains, with the transformers engine; and
two runs side by side.
"""

import contextlib
import re
import sqlite3
import statistics
import subprocess
from collections.abc import Callable
from datetime import datetime

import pytest
from e2e_support import SMALL, LiveRun, async_rl, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "timeouts.call_s=10",
)


def scaled(run: LiveRun, *words: str) -> subprocess.CompletedProcess[str]:
    return async_rl("scale", str(run.run_dir), *words)


def is_at(run: LiveRun, pool: str, count: int) -> bool:
    """Whether the pool has as many as wanted, and nobody who comes or goes."""
    found = next((p for p in run.now()["pools"] if p["pool"] == pool), None)
    return found is not None and (
        found["wanted"],
        found["live"],
        found["starting"],
        found["draining"],
    ) == (count, count, 0, 0)


def no_pause(rows: list[dict[str, float]]) -> None:
    """The learner waits for nobody's join; only batches may come later, which one core makes more
    slowly while it starts two engines. Three join, so a single slow step is the machine's.
    """
    step_s = statistics.median(row["time/step_s"] for row in rows)
    training = ("time/wait_batch_s", "time/advantages_s", "time/forward_s", "time/update_s")
    besides_s = [row["time/step_s"] - sum(row.get(name, 0.0) for name in training) for row in rows]
    longest_s = sorted(row["time/step_s"] for row in rows)[-5:]
    assert sorted(besides_s)[-2] < max(2 * step_s, 2.0), (step_s, sorted(besides_s)[-5:])
    assert longest_s[-2] < max(10 * step_s, 8.0), (step_s, longest_s)


def joins(run: LiveRun) -> list[tuple[str, int, int]]:
    """Of each that joined: its name, the steps between its join and its first group, the versions
    that group was behind at the join.
    """
    found = []
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        committed_s = [at_s for (at_s,) in store.execute("SELECT committed_s FROM steps")]
        for line in (run.run_dir / "logs" / "supervisor.log").read_text().splitlines():
            if serves := re.search(r"^(\S+ \S+) .* (generator-[12]) serves at", line):
                joined_s, name = datetime.fromisoformat(serves[1]).timestamp(), serves[2]
                handed_out = (
                    "SELECT at_s, version FROM transitions WHERE generator=? AND state='generating'"
                    " AND at_s>? ORDER BY at_s"
                )
                at_s, version = store.execute(handed_out, (name, joined_s)).fetchone()
                waited = sum(joined_s < one <= at_s for one in committed_s)
                found.append(
                    (name, waited, max(0, sum(one <= joined_s for one in committed_s) - version))
                )
    return found


def test_generators_and_verifiers_come_and_go_while_the_learner_keeps_stepping(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=100000")
    run.until(lambda: run.step >= 5, "step 5")
    learner, first = run.pid_of("learner-0"), run.step
    for generators, verifiers in ((3, 2), (1, 1), (2, 1)):
        done = scaled(run, f"generators={generators}", f"verifiers={verifiers}")
        assert done.returncode == 0, done.stderr
        assert f"generators: wanted {generators}; now live" in done.stdout
        run.until(
            lambda count=generators: is_at(run, "generators", count), f"{generators} generators"
        )
        run.until(lambda count=verifiers: is_at(run, "verifiers", count), f"{verifiers} verifiers")
        at = run.step
        run.until(lambda at=at: run.step >= at + 4, "four more steps")
    wrong = scaled(run, "generator=2")
    refusal = (
        "error: generator=2: there is no such pool; did you mean generators? this run has"
        " generators, verifiers\n"
    )
    assert (wrong.returncode, wrong.stderr) == (2, refusal)
    assert run.pid_of("learner-0") == learner
    assert async_rl("stop", str(run.run_dir)).returncode == 0
    assert run.wait() == 0, run.terminal
    assert run.processes() == []
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    no_pause(rows[first:])
    joined = joins(run)
    assert len(joined) == 3
    for name, versions_waited, versions_behind in joined:
        assert versions_behind <= 1, (  # a committed step may not be yet
            f"{name} began with weights older than the newest published"
        )
        assert versions_waited <= 2, (
            f"{name} had work only {versions_waited} versions after its join"
        )
    assert max(row["staleness/max_versions"] for row in rows) <= 2
    assert {row["scale/generators_wanted"] for row in rows} == {1, 2, 3}
    assert run.audit()["problems"] == []
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        workers = {
            name
            for (name,) in store.execute(
                "SELECT DISTINCT generator FROM groups WHERE state='trained'"
            )
        }
        dropped = store.execute("SELECT count(*) FROM transitions WHERE state='dropped'").fetchone()
    assert (
        {"generator-0", "generator-1"} <= workers <= {"generator-0", "generator-1", "generator-2"}
    )
    assert dropped == (0,)
    log = (run.run_dir / "logs" / "supervisor.log").read_text()
    assert len(re.findall(r"(?:generator|verifier)-\d has left", log)) == 3
    assert "; restarting" not in log, "nobody who left was taken for lost"


def test_a_run_without_generators_waits_says_so_and_goes_on_beside_another_run_that_is_scaled_too(
    launch: Launch,
) -> None:
    before = shared_memory()
    run = launch(*QUICK, "num_steps=12", "generators.count=0")
    beside = launch(*QUICK, "num_steps=30", "generators.count=1", name="beside")
    run.until(
        lambda: (
            "generators: 0 wanted, 0 live (async-rl scale generators=1 continues)" in run.status()
        ),
        "status says what is missing",
        look_s=1,
    )
    beside.until(lambda: beside.step >= 1, "its first step")
    assert [scaled(run, "generators=1").returncode, scaled(beside, "generators=2").returncode] == [
        0,
        0,
    ]
    assert [one.wait() for one in (run, beside)] == [0, 0], run.terminal + beside.terminal
    for one, num_steps in ((run, 12), (beside, 30)):
        assert [row["step"] for row in one.rows] == list(range(1, num_steps + 1))
        assert one.audit()["problems"] == []
        assert one.processes() == []
    assert shared_memory() <= before
