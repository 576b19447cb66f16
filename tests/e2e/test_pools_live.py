"""Two pools that train, with settings of their own, and one that evaluates: scaled each by itself
while a run trains.
"""

import contextlib
import sqlite3
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun, async_rl

from async_rl.runs.control import ask_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOLS = (
    "generators.count=0",
    "generators.pools.big={count:1,work:train,max_concurrent_groups:2}",
    "generators.pools.small={count:1,work:train,max_concurrent_groups:1}",
    "generators.pools.judge={count:1,work:evaluation,max_concurrent_groups:8}",
)
EVALUATION = ("evaluation.every_steps=2", "evaluation.num_prompts=6")


def counts(run: LiveRun) -> dict[str, tuple[int, int]]:
    """(wanted, live) of each pool; (-1, -1) where somebody starts or leaves."""
    told = ask_status(run.run_dir)
    pools = told.pools if told is not None else []
    return {
        pool.pool: (pool.wanted, pool.live) if pool.starting == pool.draining == 0 else (-1, -1)
        for pool in pools
    }


def step(run: LiveRun) -> int:
    """As the run tells it; the rows of metrics.jsonl wait for evaluations."""
    told = ask_status(run.run_dir)
    return told.step if told is not None else 0


def scaled(run: LiveRun, *words: str) -> str:
    done = async_rl("scale", str(run.run_dir), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _has_generated(run: LiveRun, name: str) -> bool:
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        found = "SELECT 1 FROM transitions WHERE generator=? AND state='generating'"
        return store.execute(found, (name,)).fetchone() is not None


def test_pools_are_scaled_one_by_one_and_only_the_evaluating_one_evaluates(
    launch: Callable[..., LiveRun],
) -> None:
    run = launch(*SMALL, *EVALUATION, *POOLS, "timeouts.call_s=10", "num_steps=100000")
    run.until(
        lambda: bool(run.rows) and run.step >= 2, "two steps and the evaluation of the second"
    )
    learner = run.pid_of("learner-0")
    alone = {"generators": (0, 0), "verifiers": (1, 1)}
    one_each = {
        "generators.big": (1, 1),
        "generators.small": (1, 1),
        "generators.judge": (1, 1),
    } | alone
    run.until(lambda: counts(run) == one_each, "one of each pool")
    run.until(lambda: _has_generated(run, "generator-small-0"), "a group of the small one")

    said = scaled(run, "generators.big=2", "small=0", "judge=0")
    assert "generators.small: wanted 0; now live" in said
    there = {
        "generators.big": (2, 2),
        "generators.small": (0, 0),
        "generators.judge": (0, 0),
    } | alone
    run.until(lambda: counts(run) == there, "two big ones alone")
    at = step(run)
    run.until(lambda: step(run) >= at + 4, "four steps without an evaluator")
    status = run.status()
    assert (
        "generators.judge: 0 wanted, 0 live (evaluations wait; async-rl scale generators.judge=1"
        " continues)" in " ".join(status.split())
    )
    waits = [m["waits_for"] for m in run.told()["members"] if m["name"] == "buffer"]
    assert "no generator of generators.judge requests work" in waits[0], status

    scaled(run, "judge=1")
    run.until(lambda: run.step >= at + 4, "the evaluations that had to wait")
    assert run.pid_of("learner-0") == learner
    assert async_rl("stop", str(run.run_dir)).returncode == 0
    assert run.wait() == 0, run.terminal
    assert run.processes() == []
    assert run.audit()["problems"] == []
    evaluated = [row for row in run.rows if row["step"] % 2 == 0 and row["step"] <= at + 4]
    assert all(row["eval/num_samples"] == 6 for row in evaluated)
    assert all(row["eval/version_mean"] >= row["step"] for row in evaluated)
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        wrote = "SELECT DISTINCT generator FROM groups WHERE purpose=? AND state=?"
        column = (
            "SELECT DISTINCT transitions.generator FROM transitions JOIN groups USING (group_id)"
            " WHERE purpose=? AND transitions.state=?"
        )
        judges = {name for (name,) in store.execute(column, ("eval", "generating"))}
        trainers = {name for (name,) in store.execute(column, ("train", "generating"))}
        trained = {name for (name,) in store.execute(wrote, ("train", "trained"))}
    assert judges == {"generator-judge-0"}
    assert trainers == {"generator-big-0", "generator-big-1", "generator-small-0"}
    assert {"generator-big-0", "generator-big-1"} <= trained <= trainers
