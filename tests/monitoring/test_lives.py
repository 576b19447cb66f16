"""A learner that was replaced may still send its first message; the run has moved on by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from async_rl.core.errors import Superseded
from async_rl.protocol.learner import StartFrom
from async_rl.protocol.membership import ReportMetrics
from async_rl.supervision.monitor import Monitor


def test_the_late_start_of_an_earlier_life_deletes_no_rows(
    monitor_of: Callable[..., Monitor], tmp_path: Path
) -> None:
    with monitor_of() as monitor:
        for life, version in ((1, 0), (3, 0), (3, 0)):
            monitor.start_from(StartFrom(life=life, version=version))
        for step in (1, 3):
            scalars = {"reward/mean": 0.5}
            report = ReportMetrics(source="learner-0", step=step, scalars=scalars)
            monitor.on_metrics(report)
        with pytest.raises(Superseded, match="life 2 of the learner is refused: life 3 runs"):
            monitor.start_from(StartFrom(life=2, version=0))
        assert monitor.step == 3
        monitor.start_from(StartFrom(life=4, version=1))
        assert monitor.step == 1
    rows = [
        msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    ]
    assert [row["step"] for row in rows] == [1]
