"""A run whose samples agents make, through the loss of each process that takes part."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_support import LiveRun, async_rl

from async_rl.examples import tool_agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Launch = Callable[..., LiveRun]


def test_sessions_survive_or_are_drawn_again_and_each_is_trained_once(
    launch: Launch, tmp_path: Path
) -> None:
    # Under another name, so that the run uses the model that other tests have made already.
    shutil.copy(tool_agent.__file__, tmp_path / "my_agent.py")
    run = launch(
        "conf=grpo_code",
        f"rollout.fn=[{tmp_path}/my_agent.py:solve]",
        "rollout.max_turns=2",
        "data.max_response_tokens=176",
        "generation.engine=hf",
        "buffer.groups_per_step=4",
        "generation.group_size=4",
        "evaluation.every_steps=0",
        "num_steps=12",
    )
    # On a new machine the model is made first, beside that of the tests of the other worker.
    run.until(lambda: run.step >= 1, "the first step", timeout_s=480)
    gateway = psutil.Process(run.pid_of("gateway-0"))
    workers = [p for p in gateway.children() if "async_rl.sessions.worker" in p.cmdline()]
    assert len(workers) == 2
    workers[0].send_signal(signal.SIGKILL)
    step = run.step
    run.until(lambda: run.step > step, "a step after the loss of an environment's worker")
    run.kill("generator-0")
    step = run.step
    run.until(lambda: run.step > step + 2, "steps after the loss of the generator")
    run.kill("gateway-0")
    step = run.step
    run.until(lambda: run.step > step + 2, "steps after the loss of the gateway")
    assert run.wait() == 0, run.terminal
    assert run.rows[-1]["step"] == 12
    assert run.audit()["problems"] == []
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    # Half of the samples need a second turn: among three there may be none.
    shown = async_rl("rollouts", str(run.run_dir), "--num", "50").stdout
    assert "gateway-0" in shown
    assert "2 turns" in shown
