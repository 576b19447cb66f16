"""The alarm of a step of which no sample was rewarded: scoring may be broken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from members import reply
from rich.console import Console as RichConsole
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console
from async_rl.monitoring.status import render
from async_rl.observability.logs import configure_logging, log_path
from async_rl.protocol.membership import ReportMetrics
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry


@pytest.mark.covers("check_verifier_status as an alarm")
def test_the_first_step_without_a_reward_raises_it_and_again_only_after_one_with(
    config: RunConfig, tmp_path: Path
) -> None:
    config = replace(config, monitoring=replace(config.monitoring, tensorboard_port=None))
    log = configure_logging(tmp_path, "supervisor")
    registry = Registry()
    with Monitor(
        config,
        tmp_path,
        step=0,
        registry=registry,
        liveness=Liveness(registry, config.timeouts, is_local=True),
        console=Console(config, tmp_path),
        log=log,
    ) as monitor:
        for step, share in enumerate((0.5, 1.0, 1.0, 0.99, 1.0), 1):
            told = {"reward/failed_share": share}
            monitor.on_metrics(
                ReportMetrics(source="learner-0", step=step, scalars=told, histograms={}, texts={})
            )
    warned = [
        line
        for line in log_path(tmp_path, "supervisor").read_text().splitlines()
        if "no sample has a reward above" in line
    ]
    assert ["step 2:" in warned[0], "step 5:" in warned[1], len(warned)] == [True, True, 2]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("run/alarm")] == [2, 5]


@pytest.mark.parametrize(("share", "is_told"), [(1.0, True), (0.99, False)])
def test_status_tells_it_as_long_as_it_is_so(share: float, is_told: bool) -> None:
    out = io.StringIO()
    RichConsole(file=out, width=200).print(
        render(reply(metrics={"reward/failed_share": share}), now_s=60.0)
    )
    alarm = "last step: no sample has a reward above reward.fail_reward"
    assert (alarm in out.getvalue()) == is_told
