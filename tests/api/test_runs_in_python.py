"""Runs as a Python program sees them, with a process that writes the files of a supervisor."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import async_rl
from async_rl.core.errors import ConfigError, DeadlineExceeded, RunFailed
from async_rl.launchers.api import starting
from async_rl.runs.control import living_pid
from async_rl.runs.status import RunState

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: end("stopped"))
def end(outcome, cause=""):
    (run_dir / "state.json").write_text(json.dumps({"outcome": outcome, "cause": cause}))
    sys.exit(0)
with (run_dir / "metrics.jsonl").open("a") as rows:
    for step in range(1, 4):
        rows.write(json.dumps({"step": step, "time_s": 1.5 * step, "reward/mean": step / 4}))
        rows.flush()
        rows.write("\\n")
        rows.flush()
"""
"""A run of three steps."""


def begin(monkeypatch: pytest.MonkeyPatch, folder: Path, end: str) -> async_rl.Run:
    """Launch a run whose supervisor is the script above, with this last line."""
    script = folder / "supervisor.py"
    script.write_text(f"{SCRIPT}{end}\n")
    popen = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "async_rl.launchers.supervise_run"]
        return popen([command[0], str(script), command[3]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(starting.subprocess, "Popen", started)
    return async_rl.launch("grpo_code", {"output_dir": folder, "run_name": "mine", "num_steps": 3})


def test_steps_are_yielded_until_the_run_ends_and_their_metrics_are_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    late = f"""open({str(gate)!r}).read()
with (run_dir / "metrics.jsonl").open("a") as rows:
    rows.write('{{"step": 4, "eval/pass_at_1": 0.5}}\\n{{"ste')
end("finished")"""
    run = begin(monkeypatch, tmp_path, late)
    steps = run.steps()
    assert [next(steps)["reward/mean"] for _ in range(3)] == [0.25, 0.5, 0.75]
    gate.write_text("go on")
    assert next(steps) == {"step": 4, "eval/pass_at_1": 0.5}
    assert list(steps) == []
    assert run.wait().state is RunState.FINISHED
    assert [step["step"] for step in run.steps()] == [1, 2, 3, 4], "also after the end"
    metrics = run.metrics()
    np.testing.assert_array_equal(metrics["step"], [1, 2, 3, 4])
    np.testing.assert_array_equal(metrics["reward/mean"], [0.25, 0.5, 0.75, math.nan])
    np.testing.assert_array_equal(metrics["eval/pass_at_1"], [math.nan] * 3 + [0.5])
    assert metrics["step"].dtype == np.float64
    assert len(metrics) == len(list(metrics)) == 4
    assert run.config.num_steps == 3


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ('end("failed", "learner-0: not finite")', "failed at step 3: learner-0: not finite"),
        ("os.kill(os.getpid(), 9)", r"killed at step 3: .*; see async-rl logs mine"),
    ],
)
def test_a_failed_or_killed_run_raises_its_cause_after_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, cause: str
) -> None:
    run = begin(monkeypatch, tmp_path, end)
    steps = run.steps()
    assert [next(steps)["step"] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RunFailed, match=f"run mine {cause}"):
        next(steps)
    with pytest.raises(RunFailed, match=cause):
        run.wait()


def test_a_function_follows_the_steps_and_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def on_step(run: async_rl.Run, metrics: dict[str, float]) -> bool:
        seen.append((run.name, metrics["step"]))
        return metrics["step"] < 2

    run = begin(monkeypatch, tmp_path, "time.sleep(60)")
    assert run.follow(on_step).state is RunState.STOPPED
    assert seen == [("mine", 1), ("mine", 2)]


def test_a_run_is_waited_for_in_a_notebook_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cell() -> async_rl.RunStatus:
        """A notebook's cell: an event loop is running."""
        run = begin(monkeypatch, tmp_path, "time.sleep(60)")
        steps = run.steps()
        assert [next(steps)["step"] for _ in range(3)] == [1, 2, 3]
        assert run.status().state is RunState.STARTING, "its control socket does not answer"
        with pytest.raises(DeadlineExceeded, match="has not ended after 0 s"):
            run.wait(timeout_s=0)
        return run.stop()

    status = asyncio.run(cell())
    assert (status.state, status.step) == (RunState.STOPPED, 3)
    with pytest.raises(ConfigError, match=r"is not running \(stopped\); last step 3 of 3; async"):
        async_rl.open_run(tmp_path / "mine").scale(generators=2)


def test_a_run_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import sys, subprocess, os, signal
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import pytest, test_runs_in_python
patch = pytest.MonkeyPatch()
test_runs_in_python.begin(patch, Path({str(tmp_path)!r}), "time.sleep(60)")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = async_rl.open_run(tmp_path / "mine")
    assert run.status().state is RunState.STARTING
    pid = living_pid(run.directory)
    assert pid is not None
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal of the first process does not reach it"
    assert next(run.steps())["step"] == 1, "its handler of SIGTERM is set now"
    assert run.stop().state is RunState.STOPPED


def test_wrong_settings_raise_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_steps=0: must be greater than or equal to 1"):
        async_rl.launch("grpo_code", {"num_steps": 0, "output_dir": tmp_path / "runs"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="neither a run in"):
        async_rl.open_run(tmp_path)
