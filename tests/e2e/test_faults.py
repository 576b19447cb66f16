"""What a run does when its processes die. The transformers engine stands in for vLLM: its start is
quick, the paths are the same.
"""

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "timeouts.call_s=10",
)


def test_every_role_that_is_killed_comes_back_and_the_run_reaches_its_last_step(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=44", "checkpoint.every_steps=4")
    run.until(lambda: run.step >= 3, "step 3")
    others = ("generator-0", "verifier-0", "buffer")
    times_s: dict[str, float] = {}
    for process in others:
        killed_at, pid = run.step, run.pid_of(process)
        if process == "generator-0":
            run.until(lambda: _is_generating(run, "generator-0"), "it has work", look_s=0.01)
        os.kill(pid, signal.SIGKILL)
        times_s[process] = time.time()
        run.until(
            lambda killed_at=killed_at: run.step >= killed_at + 6,
            f"six more steps after {process} was killed",
        )
        assert run.pid_of(process) != pid

    stayed_up = [run.pid_of(process) for process in others]
    run.until(lambda: run.step % 4 == 1, "a step after that of a checkpoint")
    run.kill("learner-0")
    log = run.run_dir / "logs" / "learner-0.log"
    run.until(
        lambda: "resumes from" in log.read_text(), "the learner resumes from its last checkpoint"
    )
    assert [run.pid_of(process) for process in others] == stayed_up

    assert run.wait() == 0, run.terminal
    assert (run.run_dir / "logs" / "supervisor.log").read_text().count("learner-0 started") == 2
    assert [row["step"] for row in run.rows] == list(range(1, 45))
    assert max(row["staleness/max_versions"] for row in run.rows) <= 2
    assert run.processes() == []
    found = run.audit()
    assert (found["problems"], found["num_steps"]) == ([], 44)
    assert found["num_undone_steps"] > 0
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        given_back = store.execute(
            "SELECT at_s FROM transitions WHERE state='issued' AND reason='generator_lost'"
        ).fetchall()
    after_s = [at_s - times_s["generator-0"] for (at_s,) in given_back]
    assert max(after_s) < 10.0, "a killed generator's work goes back before its silence is noticed"


def test_a_learner_that_dies_too_often_ends_the_run_non_zero_with_the_cause_first(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=1000", "supervisor.max_restarts=0")
    log = run.run_dir / "logs" / "supervisor.log"
    run.until(
        lambda: log.exists() and "learner-0 started" in log.read_text(), "the learner's start"
    )
    run.kill("learner-0")
    assert run.wait(timeout_s=60) == 1
    assert "learner-0 was ended by SIGKILL" in run.terminal
    assert run.processes() == []


def test_a_hung_generator_is_cut_off_at_the_deadline_and_comes_back(launch: Launch) -> None:
    # A push is cut off after 10 s (start_s / 3), long before the silence of 45 s (1.5 call_s). The
    # group that it holds must not hold up the step whose push finds it.
    times = ("timeouts.start_s=30", "timeouts.call_s=30")
    one_group = "generation.max_concurrent_groups=1"
    run = launch(*SMALL, *times, one_group, "num_steps=1000", "generators.count=2")
    run.until(lambda: run.step >= 2, "step 2")
    stopped = run.pid_of("generator-1")
    run.kill("generator-1", signal.SIGSTOP)
    at = run.step
    run.until(lambda: run.step >= at + 5, "five more steps while one generator hangs")
    run.until(lambda: _is_replaced(run, "generator-1", stopped), "the hung generator was replaced")
    assert (
        "the learner removed generator-1" in (run.run_dir / "logs" / "supervisor.log").read_text()
    )
    at = run.step
    run.until(lambda: run.step >= at + 2, "the run goes on")
    _leaves_in_order(run)


def test_a_generator_that_hangs_unseen_is_found_by_its_silence_and_a_second_ctrl_c_ends_at_once(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=1000", "timeouts.call_s=2")
    run.until(lambda: run.step >= 2, "step 2")
    stopped = run.pid_of("generator-0")
    run.kill("generator-0", signal.SIGSTOP)
    run.until(
        lambda: _is_replaced(run, "generator-0", stopped),
        "the hung generator was replaced",
        timeout_s=30,
    )
    assert (
        "generator-0 sent no heartbeat for 3 s"
        in (run.run_dir / "logs" / "supervisor.log").read_text()
    )
    at = run.step
    run.until(lambda: run.step >= at + 4, "the run goes on")
    assert run.audit()["problems"] == []
    run.kill("learner-0", signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "Ctrl-C again" in run.terminal, "the first Ctrl-C was taken")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(timeout_s=15) == 0
    assert run.processes() == []


def _leaves_in_order(run: LiveRun) -> None:
    """Ctrl-C finishes the step, saves and leaves."""
    run.process.send_signal(signal.SIGINT)
    assert run.wait(timeout_s=60) == 0, run.terminal
    saved = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
    assert saved[-1] == f"step_{run.step:06d}"
    assert "stopped at step" in run.terminal
    assert run.processes() == []


def _is_generating(run: LiveRun, generator: str) -> bool:
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        found = "SELECT 1 FROM groups WHERE generator=? AND state='generating'"
        return store.execute(found, (generator,)).fetchone() is not None


def _is_replaced(run: LiveRun, process: str, pid: int) -> bool:
    try:
        return run.pid_of(process) != pid
    except AssertionError:
        return False
