"""A process that is stopped or killed shows in `async-rl status` and in TensorBoard at once, with
its cause.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "num_steps=100000",
    "supervisor.max_restarts=9",
    "monitoring.tensorboard_port=0",
    # Silence ends a process after 30 s (1.5 call_s), later than anything here waits.
    "timeouts.call_s=20",
)
VISIBLE_S = 5.0
LATEST_S = 20.0
"""A machine that is shared may be late now and then, not as a rule. `--junitxml FILE` writes down
what it took.
"""


def texts(run: LiveRun, tag: str) -> str:
    """All that TensorBoard serves under a text tag."""
    found = re.search(r"TensorBoard  (http://[^/]+)/", run.terminal)
    assert found, run.terminal
    try:
        with urllib.request.urlopen(
            f"{found[1]}/data/plugin/text/text?run={run.run_dir.name}&tag={tag}", timeout=10
        ) as reply:
            return str(json.loads(reply.read()))
    except (urllib.error.URLError, ValueError):  # not up yet, or no such tag yet
        return ""


def seconds_until(run: LiveRun, condition: Callable[[], bool], what: str) -> float:
    started_s = time.monotonic()
    run.until(condition, what, timeout_s=LATEST_S)
    return time.monotonic() - started_s


def test_stopped_and_killed_processes_show_with_their_cause_and_nothing_outlives_the_supervisor(
    launch: Launch, record_property: Callable[[str, object], None]
) -> None:
    before = shared_memory()
    run = launch(*QUICK)
    run.until(lambda: run.step >= 1, "step 1")
    run.until(lambda: bool(texts(run, "run/config")), "TensorBoard answers")
    took_s: dict[str, float] = {}
    for process in ("generator-0", "verifier-0", "buffer"):
        pid = run.pid_of(process)
        # A late heartbeat may have been announced before.
        announced = texts(run, "run/silent").count(f"{process} is silent")
        run.kill(process, signal.SIGSTOP)
        took_s[f"{process} stopped, TensorBoard"] = seconds_until(
            run,
            lambda process=process, announced=announced: (
                texts(run, "run/silent").count(f"{process} is silent") > announced
            ),
            f"{process} is silent in TensorBoard",
        )
        member = next(m for m in run.told()["members"] if m["name"] == process)
        assert member["state"] == "silent"
        assert f"stopped by a signal; kill -CONT {pid} continues it" in member["waits_for"]
        run.kill(process, signal.SIGCONT)
        run.until(
            lambda process=process: f"{process} sends heartbeats again" in texts(run, "run/silent"),
            f"{process} sends heartbeats again",
        )
        run.kill(process)
        took_s[f"{process} killed, status"] = seconds_until(
            run,
            lambda process=process: "SIGKILL" in run.now()["restarted_because"].get(process, ""),
            f"{process} killed in status",
        )
        took_s[f"{process} killed, TensorBoard"] = seconds_until(
            run,
            lambda process=process: (
                f"{process} is restarted: {process} was ended by SIGKILL"
                in texts(run, "run/restarts")
            ),
            f"{process} killed in TensorBoard",
        )
    at = run.step
    run.until(lambda: run.step >= at + 2, "two more steps after all came back")
    for what, seconds in took_s.items():
        record_property(what, f"{seconds:.1f} s")
    assert statistics.median(took_s.values()) < VISIBLE_S, took_s
    _leaves_nothing(run)
    assert shared_memory() <= before


def _leaves_nothing(run: LiveRun) -> None:
    """The supervisor is killed."""
    commands = [" ".join(process.info["cmdline"]) for process in run.processes()]
    assert sum("--name" in command for command in commands) == 4
    assert any("tensorboard" in command for command in commands)
    run.process.kill()
    run.process.wait()
    deadline_s = time.monotonic() + 10
    while run.processes() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert run.processes() == []
