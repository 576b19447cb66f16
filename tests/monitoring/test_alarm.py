"""The alarm of a step of which no sample was rewarded: scoring may be broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.observability.logs import log_path
from async_rl.protocol.membership import ReportMetrics
from async_rl.supervision.monitor import Monitor


@pytest.mark.covers("check_verifier_status as an alarm")
def test_the_first_step_without_a_reward_raises_it_and_again_only_after_one_with(
    monitor_of: Callable[..., Monitor], tmp_path: Path
) -> None:
    with monitor_of() as monitor:
        for step, share in enumerate((0.5, 1.0, 1.0, 0.99, 1.0), 1):
            told = {"reward/failed_share": share}
            monitor.on_metrics(ReportMetrics(source="learner-0", step=step, scalars=told))
    warned = [
        line
        for line in log_path(tmp_path, "supervisor").read_text().splitlines()
        if "no sample has a reward above" in line
    ]
    assert ["step 2:" in warned[0], "step 5:" in warned[1], len(warned)] == [True, True, 2]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("run/alarm")] == [2, 5]
