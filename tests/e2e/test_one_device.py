"""One device for generators and learner: a generator that is killed asleep, and a stop while the
learner has the device.
"""

import signal
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_SLEEPS = "generation sleeps: the learner uses the device"


def test_handovers_continue_after_a_sleeping_generator_died_and_end_in_order_during_a_step(
    launch: Callable[..., LiveRun],
) -> None:
    # 25 epochs: the learner uses the device long enough to be seen from outside.
    run = launch(
        *SMALL,
        "placement=colocated",
        "num_steps=200",
        "learner.epochs=25",
        "timeouts.call_s=10",
    )

    def sleeps() -> bool:
        return run.member("generator-0").get("waits_for") == _SLEEPS

    run.until(lambda: run.step >= 1 and sleeps(), "a handover")
    killed = run.pid_of("generator-0")
    run.kill("generator-0")
    run.serves_again("generator-0", killed)
    step = run.step
    run.until(lambda: run.step >= step + 2 and sleeps(), "another handover")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.terminal
    assert "the run has stopped at step" in run.terminal
    for seconds in (
        "blocked_s/generator/generation_sleeps",
        "stage_s/learner/moving_to_the_device",
    ):
        assert any(row.get(seconds, 0.0) > 0 for row in run.rows), seconds
    assert max(row["staleness/max_versions"] for row in run.rows[1:]) <= 2
    assert max(row["weights/probe_abs_max"] for row in run.rows[1:]) < 1e-3
    assert run.audit()["problems"] == []
