from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.monitoring import recorder as recorder_module
from async_rl.protocol.supervisor import ReportMetrics

TWO_ROWS = b'{"step":0,"time_s":3.5}\n{"step":1,"time_s":9.5}\n'


class Recorder(recorder_module.Recorder):
    """The product's own, whose messages are written in one line."""

    def record(  # type: ignore[override]
        self, step: int, source: str, scalars: dict[str, float]
    ) -> None:
        super().record(ReportMetrics(source=source, step=step, scalars=scalars))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(
    tmp_path: Path,
    config: RunConfig,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Any:
    monkeypatch.setattr(recorder_module, "HOLD_S", 100.0)
    recorder = Recorder(tmp_path, config, clock=clock)
    yield recorder
    recorder.close()
    assert "wrote the" not in caplog.text, "metrics that the catalogue does not declare"


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [
        msgspec.json.decode(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()
    ]


def events(run_dir: Path) -> list[event_pb2.Event]:
    (path,) = (run_dir / "tensorboard").glob("events.*")
    return list(EventFileLoader(str(path)).Load())


def test_rows_come_in_order_with_numbers_of_every_process_though_an_evaluation_comes_late(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    clock.now += 1
    recorder.record(1, "supervisor", {"throughput/steps_per_s": 1.5})
    assert [r["step"] for r in rows(tmp_path)] == [0]
    recorder.record(1, "learner-0", {"reward/mean": float("nan")})
    for step in (2, 3):
        clock.now += 1
        recorder.record(step, "learner-0", {"reward/mean": step / 10})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]
    clock.now += 1
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    assert rows(tmp_path) == [
        {"step": 0, "time_s": 0.0, "eval/pass_at_1": 0.25},
        {"step": 1, "time_s": 1.0, "throughput/steps_per_s": 1.5, "reward/mean": None},
        {"step": 2, "time_s": 2.0, "reward/mean": 0.2, "eval/pass_at_1": 0.5},
        {"step": 3, "time_s": 3.0, "reward/mean": 0.3},
    ]


def test_time_never_falls_and_a_missing_evaluation_is_not_waited_for_longer_than_hold_s(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    clock.now += 1
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    assert [(r["step"], r["time_s"]) for r in rows(tmp_path)] == [(0, 0.0), (1, 0.0)]
    recorder.record(2, "learner-0", {"reward/mean": 0.3})
    clock.now += 99
    recorder.flush()
    assert len(rows(tmp_path)) == 2
    clock.now += 1
    recorder.flush()
    assert rows(tmp_path)[2] == {"step": 2, "time_s": 1.0, "reward/mean": 0.3}
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    assert len(rows(tmp_path)) == 3, "a step has one row"


def test_a_row_needs_no_evaluation_that_is_off_and_is_handed_on_once_and_in_order(
    tmp_path: Path, config: RunConfig
) -> None:
    written: list[tuple[int, dict[str, float]]] = []
    own = replace(config, evaluation=replace(config.evaluation, every_steps=0))
    recorder = Recorder(tmp_path, own, on_row=lambda step, row: written.append((step, {**row})))
    recorder.record(2, "supervisor", {"throughput/steps_per_s": 2.0})
    for step in (1, 2):
        recorder.record(step, "learner-0", {"reward/mean": 0.25})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    recorder.close()
    second = {"throughput/steps_per_s": 2.0, "reward/mean": 0.25}
    assert written == [(1, {"reward/mean": 0.25}), (2, second)]


@pytest.mark.covers("test_freq")
def test_evaluations_are_due_at_zero_at_every_nth_and_at_the_last_step(config: RunConfig) -> None:
    every_three = replace(config, evaluation=replace(config.evaluation, every_steps=3))
    assert [step for step in range(5) if every_three.is_evaluated(step)] == [0, 3, 4]


def test_tensorboard_gets_scalars_events_and_ten_charts(tmp_path: Path, config: RunConfig) -> None:
    recorder = Recorder(tmp_path, config)
    recorder.record(1, "learner-0", {"reward/mean": 0.75})
    recorder.note("stalled", "who waits for what", 1)
    recorder.close()
    values = {(e.step, v.tag): v for e in events(tmp_path) for v in e.summary.value}
    reward = values[1, "reward/mean"]
    assert tensor_util.make_ndarray(reward.tensor) == 0.75
    assert reward.metadata.summary_description.startswith("mean task reward of the step's samples")
    assert tensor_util.make_ndarray(values[1, "run/stalled"].tensor).item() == b"who waits for what"
    layout = tensor_util.make_ndarray(values[0, "custom_scalars__config__"].tensor).item()
    assert len(layout_pb2.Layout.FromString(layout).category[0].chart) == 10


def test_rows_of_a_history_that_was_given_up_are_replaced_and_tensorboard_forgets_them(
    recorder: Recorder, tmp_path: Path
) -> None:
    for step in (1, 2):
        recorder.record(step, "learner-0", {"reward/mean": step / 10})
    recorder.start_from(1)
    # The first evaluation has its row though the learner restarts before it.
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    recorder.record(2, "learner-0", {"reward/mean": 0.3})
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    written = [(r["step"], r.get("reward/mean")) for r in rows(tmp_path)]
    assert written == [(0, None), (1, 0.1), (2, 0.3)]
    restarts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert restarts == [2]


def test_the_evaluation_of_the_version_that_a_run_goes_on_from_holds_nothing_up(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    """The learner's part of that row is lost with the supervisor that held it back."""
    (tmp_path / "metrics.jsonl").write_bytes(TWO_ROWS)
    recorder = Recorder(tmp_path, config, clock=clock)
    recorder.start_from(2)
    recorder.record(3, "learner-0", {"reward/mean": 0.7})
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    recorder.close()
    assert [r["step"] for r in rows(tmp_path)] == [0, 1, 2, 3]


def test_a_resume_counts_time_on_and_drops_half_a_row(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(TWO_ROWS + b'{"step":2,"ti')
    recorder = Recorder(tmp_path, config, clock=clock)
    recorder.start_from(0)
    clock.now += 2
    recorder.record(1, "learner-0", {"reward/mean": 0.7})
    recorder.close()
    assert [(r["step"], r["time_s"]) for r in rows(tmp_path)] == [(0, 3.5), (1, 11.5)]


def test_a_damaged_row_is_named_with_the_remedy_and_numbers_that_a_power_loss_took(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(TWO_ROWS + b'{"step":2,"ti\x00me_s":2}\n')
    said = r"line 3 of .*metrics\.jsonl is damaged .*remove this line, then async-rl resume"
    with pytest.raises(DataError, match=said):
        Recorder(tmp_path, config)
    (tmp_path / "metrics.held.json").write_bytes(b"{")
    (tmp_path / "metrics.jsonl").write_bytes(TWO_ROWS + b'{"step":2,"ti')
    recorder = Recorder(tmp_path, config)
    recorder.start_from(3)
    recorder.close()
    assert "metrics.held.json is damaged" in caplog.text
    assert "metrics.jsonl has no row for step 2, 3" in caplog.text
