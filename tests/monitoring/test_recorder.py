from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from async_rl.composition.compose import compose
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.errors import DataError
from async_rl.monitoring import recorder as recorder_module
from async_rl.observability.catalogue import METRICS
from async_rl.protocol.membership import ReportMetrics

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


def without_evaluation(config: RunConfig) -> RunConfig:
    return replace(config, evaluation=replace(config.evaluation, every_steps=0))


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


def test_a_row_needs_no_evaluation_that_is_off_and_of_a_service_no_reward(
    tmp_path: Path, config: RunConfig
) -> None:
    written: list[tuple[int, dict[str, float]]] = []
    for name, own, part in (
        ("plain", without_evaluation(config), "reward/mean"),
        ("service", compose("serve"), "policy/lr"),
    ):
        (tmp_path / name).mkdir()
        recorder = Recorder(
            tmp_path / name, own, on_row=lambda step, scalars: written.append((step, {**scalars}))
        )
        recorder.record(2, "supervisor", {"throughput/steps_per_s": 2.0})
        for step in (1, 2):
            recorder.record(step, "learner-0", {part: 0.25})
        assert [row["step"] for row in rows(tmp_path / name)] == [1, 2]
        recorder.close()
        # Each row is handed on once and in order.
        assert written == [(1, {part: 0.25}), (2, {"throughput/steps_per_s": 2.0, part: 0.25})]
        written.clear()


@pytest.mark.covers("test_freq")
def test_evaluations_are_due_at_zero_at_every_nth_and_at_the_last_step(config: RunConfig) -> None:
    every_three = replace(config, evaluation=replace(config.evaluation, every_steps=3))
    assert [step for step in range(5) if every_three.is_evaluated(step)] == [0, 3, 4]


def test_tensorboard_gets_scalars_events_and_ten_charts(tmp_path: Path, config: RunConfig) -> None:
    recorder = Recorder(tmp_path, config)
    recorder.record(1, "learner-0", {"reward/mean": 0.75})
    recorder.note("stalled", "who waits for what", 1)
    recorder.close()
    values = {
        (e.step, v.tag): v
        for e in events(tmp_path)
        if e.HasField("summary")
        for v in e.summary.value
    }
    reward = values[1, "reward/mean"]
    assert tensor_util.make_ndarray(reward.tensor) == 0.75
    assert (
        reward.metadata.summary_description
        == "mean task reward of the step's samples, before scaling (reward)"
    )
    assert reward.metadata.display_name == "reward/mean [reward]"
    assert tensor_util.make_ndarray(values[1, "run/stalled"].tensor).item() == b"who waits for what"
    layout = layout_pb2.Layout.FromString(
        tensor_util.make_ndarray(values[0, "custom_scalars__config__"].tensor).item()
    )
    charts = layout.category[0].chart
    assert len(charts) == 10
    assert charts[1].title == "2 held-out pass@1 [share]"
    names = ("eval/pass_at_1", "eval/pass_at_1_error")
    found = [name for name in names if any(re.search(p, name) for p in charts[1].multiline.tag)]
    assert found == ["eval/pass_at_1"]


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


def test_two_hours_of_the_quickest_run_add_less_than_200_mb_of_events_and_every_step_a_row(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    scalars = {
        re.sub(r"<(\w+)>", r"\1-0", name): 0.5
        for name, spec in METRICS.items()
        # A run of agents never makes eight steps per second.
        if spec.unit != "text" and not name.startswith("sessions/")
    }
    per_process = {
        name.replace("-0", f"-{i}"): 0.5 for name in scalars if "-0" in name for i in range(1, 5)
    }
    config = replace(without_evaluation(config), num_steps=10**6)
    recorder = Recorder(tmp_path, config, clock=clock)
    sizes = []
    for step in range(1, 81):
        clock.now += 0.125
        recorder.record(step, "learner-0", scalars | per_process)
        if step in (40, 80):
            recorder.note("stalled", "", step)
            sizes.append(sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir()))
    recorder.close()
    assert len(rows(tmp_path)) == 80
    assert (sizes[1] - sizes[0]) / 5 * 7200 < 200e6, "5 seconds of the clock lie between the two"
    steps = {e.step for e in events(tmp_path) for v in e.summary.value if v.tag == "reward/mean"}
    assert sorted(steps) == list(range(1, 81, 4))


def test_a_resume_and_a_return_to_an_earlier_version_read_the_end_of_the_file_only(
    config: RunConfig, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10^5 steps of 3.5 kB the file has 350 MB."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step":{n},"time_s":{n / 10}}}\n' for n in range(1, 2001)))
    inode = path.stat().st_ino
    num_read = 0
    read = records.lines_backwards

    def counting(path: Path) -> Iterator[tuple[int, bytes]]:
        nonlocal num_read
        for offset, line in read(path):
            num_read += 1
            yield offset, line

    monkeypatch.setattr(recorder_module, "lines_backwards", counting)
    recorder = Recorder(tmp_path, replace(config, num_steps=30_000), clock=clock)
    recorder.start_from(1_990)
    recorder.record(1_991, "learner-0", {"reward/mean": 0.5})
    recorder.close()
    assert num_read < 20
    assert path.stat().st_ino == inode, "the file was not written again"
    written = rows(tmp_path)
    assert [row["step"] for row in written] == list(range(1, 1_992))
    assert written[-1]["reward/mean"] == 0.5


def test_an_event_that_cannot_be_written_is_one_error_and_no_traceback(tmp_path: Path) -> None:
    program = f"""
import pathlib, resource, sys
import async_rl.monitoring.recorder
assert not {{"torch", "tensorflow"}} & set(sys.modules)
from async_rl.monitoring.event_file import EventFile
events = EventFile(pathlib.Path({str(tmp_path / "events")!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    while True:
        events.text("a", "b", 1)
        events.flush()
except OSError as error:
    print("once", error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("once [Errno 27]"), done.stderr
    assert done.stderr == ""


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
