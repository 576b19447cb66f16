"""The supervisor's monitor: the alarm of a step without a reward, and late learners."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from async_rl.core.errors import Superseded
from async_rl.observability.logs import log_path
from async_rl.protocol.buffer import StartFrom
from async_rl.protocol.supervisor import ReportMetrics
from async_rl.supervision.monitor import Monitor


def report(step: int, scalars: dict[str, float]) -> ReportMetrics:
    return ReportMetrics(source="learner-0", step=step, scalars=scalars)


@pytest.mark.covers("check_verifier_status as an alarm")
def test_the_first_step_without_a_reward_raises_it_and_again_only_after_one_with(
    monitor_of: Callable[..., Monitor], tmp_path: Path
) -> None:
    with monitor_of() as monitor:
        for step, share in enumerate((0.5, 1.0, 1.0, 0.99, 1.0), 1):
            monitor.on_metrics(report(step, {"reward/failed_share": share}))
    lines = log_path(tmp_path, "supervisor").read_text().splitlines()
    warned = [line for line in lines if "no sample has a reward above" in line]
    assert ["step 2:" in warned[0], "step 5:" in warned[1], len(warned)] == [True, True, 2]
    events = (tmp_path / "events.jsonl").read_bytes().splitlines()
    noted = [event for line in events if (event := msgspec.json.decode(line))["kind"] == "alarm"]
    assert [event["step"] for event in noted] == [2, 5]


def test_the_late_start_of_an_earlier_life_of_the_learner_deletes_no_rows(
    monitor_of: Callable[..., Monitor], tmp_path: Path
) -> None:
    with monitor_of() as monitor:
        for life in (1, 3, 3):
            monitor.start_from(StartFrom(life=life, version=0))
        for step in (1, 3):
            monitor.on_metrics(report(step, {"reward/mean": 0.5}))
        with pytest.raises(Superseded, match="life 2 of the learner is refused: life 3 runs"):
            monitor.start_from(StartFrom(life=2, version=0))
        assert monitor.step == 3
        monitor.start_from(StartFrom(life=4, version=1))
        assert monitor.step == 1
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [1]
