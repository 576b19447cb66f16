from __future__ import annotations

import json
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


class Recorder(recorder_module.Recorder):
    """The product's own, whose messages are written in one line."""

    def record(  # type: ignore[override]
        self,
        step: int,
        source: str,
        scalars: dict[str, float] | None = None,
    ) -> None:
        super().record(
            ReportMetrics(
                source=source,
                step=step,
                scalars=scalars or {},
            )
        )


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


def test_rows_come_in_order_though_an_evaluation_comes_late(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    clock.now += 1
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]
    clock.now += 1
    recorder.record(2, "learner-0", {"reward/mean": 0.4})
    clock.now += 1
    recorder.record(3, "learner-0", {"reward/mean": 0.5})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]
    clock.now += 1
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    assert rows(tmp_path) == [
        {"step": 0, "time_s": 0.0, "eval/pass_at_1": 0.25},
        {"step": 1, "time_s": 1.0, "reward/mean": 0.3},
        {"step": 2, "time_s": 2.0, "reward/mean": 0.4, "eval/pass_at_1": 0.5},
        {"step": 3, "time_s": 3.0, "reward/mean": 0.5},
    ]


def test_time_never_falls_though_the_first_evaluation_comes_after_the_first_step(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    clock.now += 1
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    assert [(r["step"], r["time_s"]) for r in rows(tmp_path)] == [(0, 0.0), (1, 0.0)]


def test_numbers_of_the_supervisor_join_the_row_of_the_learner(
    recorder: Recorder, tmp_path: Path
) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    recorder.record(1, "supervisor", {"throughput/steps_per_s": 1.5})
    assert len(rows(tmp_path)) == 1
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    assert rows(tmp_path)[1] == {
        "step": 1,
        "time_s": 0.0,
        "throughput/steps_per_s": 1.5,
        "reward/mean": 0.3,
    }


def test_a_missing_evaluation_is_not_waited_for_longer_than_hold_s(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    recorder.record(2, "learner-0", {"reward/mean": 0.3})
    clock.now += 99
    recorder.flush()
    assert len(rows(tmp_path)) == 2
    clock.now += 1
    recorder.flush()
    assert rows(tmp_path)[2] == {"step": 2, "time_s": 0.0, "reward/mean": 0.3}
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    assert len(rows(tmp_path)) == 3, "a step has one row"


def test_close_writes_what_is_held_back(tmp_path: Path, config: RunConfig) -> None:
    recorder = Recorder(tmp_path, config)
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    assert rows(tmp_path) == []
    recorder.close()
    assert [r["step"] for r in rows(tmp_path)] == [1]


def test_without_evaluation_the_first_row_is_step_one(tmp_path: Path, config: RunConfig) -> None:
    plain = replace(config, evaluation=replace(config.evaluation, every_steps=0))
    recorder = Recorder(tmp_path, plain)
    recorder.record(1, "learner-0", {"reward/mean": 0.3})
    assert [r["step"] for r in rows(tmp_path)] == [1]
    recorder.close()


def test_a_step_of_a_service_is_complete_without_a_reward(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, compose("serve"))
    recorder.record(1, "supervisor", {"throughput/steps_per_s": 1.5})
    assert rows(tmp_path) == []
    recorder.record(1, "learner-0", {"policy/lr": 0.1, "loss/policy": 2.0})
    assert [row["loss/policy"] for row in rows(tmp_path)] == [2.0]
    recorder.close()


@pytest.mark.covers("test_freq")
def test_evaluations_are_due_at_zero_at_every_nth_and_at_the_last_step(config: RunConfig) -> None:
    every_three = replace(config, evaluation=replace(config.evaluation, every_steps=3))
    assert [step for step in range(5) if every_three.is_evaluated(step)] == [0, 3, 4]


def test_a_number_that_is_not_finite_leaves_valid_json(recorder: Recorder, tmp_path: Path) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": float("nan")})
    assert rows(tmp_path)[0]["eval/pass_at_1"] is None


def test_tensorboard_gets_scalars_events_and_the_first_screen(
    tmp_path: Path, config: RunConfig
) -> None:
    recorder = Recorder(tmp_path, config)
    recorder.record(
        1,
        "learner-0",
        {"reward/mean": 0.75},
    )
    recorder.note("stalled", "who waits for what", 1)
    recorder.close()
    values = {
        (e.step, v.tag): v
        for e in events(tmp_path)
        if e.HasField("summary")
        for v in e.summary.value
    }
    assert tensor_util.make_ndarray(values[1, "reward/mean"].tensor) == 0.75
    assert (
        values[1, "reward/mean"].metadata.summary_description
        == "mean task reward of the step's samples, before scaling (reward)"
    )
    assert values[1, "reward/mean"].metadata.display_name == "reward/mean [reward]"
    assert tensor_util.make_ndarray(values[1, "run/stalled"].tensor).item() == b"who waits for what"
    layout = layout_pb2.Layout.FromString(
        tensor_util.make_ndarray(values[0, "custom_scalars__config__"].tensor).item()
    )
    assert len(layout.category[0].chart) == 10
    assert layout.category[0].chart[1].title == "2 held-out pass@1 [share]"
    assert layout.category[0].chart[3].title == "4 effective sample size [share]"
    patterns = list(layout.category[0].chart[1].multiline.tag)
    assert [
        name
        for name in ("eval/pass_at_1", "eval/pass_at_1_error")
        if any(re.search(p, name) for p in patterns)
    ] == ["eval/pass_at_1"]


def test_the_recorder_needs_neither_torch_nor_tensorflow() -> None:
    check = (
        "import sys, async_rl.monitoring.recorder; assert not {'torch', 'tensorflow'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_rows_of_a_history_that_was_given_up_are_replaced_and_tensorboard_forgets_them(
    recorder: Recorder, tmp_path: Path, clock: Clock
) -> None:
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    recorder.record(1, "learner-0", {"reward/mean": 0.1})
    recorder.record(2, "learner-0", {"reward/mean": 0.2})
    recorder.start_from(1)
    recorder.record(2, "learner-0", {"reward/mean": 0.3})
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    assert [(r["step"], r.get("reward/mean")) for r in rows(tmp_path)] == [
        (0, None),
        (1, 0.1),
        (2, 0.3),
    ]
    restarts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert restarts == [2]


def test_the_first_evaluation_has_its_row_though_the_learner_restarts_before_it(
    recorder: Recorder, tmp_path: Path
) -> None:
    for step in (1, 2):
        recorder.record(step, "learner-0", {"reward/mean": 0.1})
    recorder.start_from(1)
    recorder.record(0, "buffer", {"eval/pass_at_1": 0.25})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]


def test_the_evaluation_of_the_version_that_a_run_goes_on_from_holds_nothing_up(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    """The learner's part of that row is lost with the supervisor that held it back."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0,"time_s":3.5}\n{"step":1,"time_s":9.5}\n')
    recorder = Recorder(tmp_path, config, clock=clock)
    recorder.start_from(2)
    recorder.record(3, "learner-0", {"reward/mean": 0.7})
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    recorder.close()
    assert [r["step"] for r in rows(tmp_path)] == [0, 1, 2, 3]


def test_rows_that_were_held_back_survive_a_killed_supervisor(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    killed = Recorder(tmp_path, config, clock=clock)
    killed.record(0, "buffer", {"eval/pass_at_1": 0.25})
    for step in (1, 2, 3):
        clock.now += 1
        killed.record(step, "learner-0", {"reward/mean": step / 10})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]
    recorder = Recorder(tmp_path, config, clock=clock)
    recorder.start_from(2)
    recorder.record(2, "buffer", {"eval/pass_at_1": 0.5})
    recorder.record(3, "learner-0", {"reward/mean": 0.9})
    assert [(r["step"], r.get("reward/mean"), r.get("eval/pass_at_1")) for r in rows(tmp_path)] == [
        (0, None, 0.25),
        (1, 0.1, None),
        (2, 0.2, 0.5),
        (3, 0.9, None),
    ]
    recorder.close()
    killed.close()


def test_a_resumed_run_counts_time_on_and_repairs_a_torn_row(
    tmp_path: Path, config: RunConfig, clock: Clock
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step":0,"time_s":3.5}\n{"step":1,"time_s":9.5}\n{"step":2,"ti'
    )
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
    config = replace(
        config,
        num_steps=10**6,
        evaluation=replace(config.evaluation, every_steps=0),
    )
    recorder = Recorder(tmp_path, config, clock=clock)
    sizes = []
    for step in range(1, 401):
        clock.now += 0.125
        recorder.record(step, "learner-0", scalars | per_process)
        if step in (200, 400):
            recorder.note("stalled", "", step)
            sizes.append(sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir()))
    recorder.close()
    assert len(rows(tmp_path)) == 400
    assert (sizes[1] - sizes[0]) / 25 * 7200 < 200e6, "25 seconds of the clock lie between the two"
    steps = sorted(
        {e.step for e in events(tmp_path) for v in e.summary.value if v.tag == "reward/mean"}
    )
    assert steps == list(range(1, 401, 4))


def test_a_resume_and_a_return_to_an_earlier_version_read_the_end_of_the_file_only(
    config: RunConfig, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10^5 steps of 3.5 kB the file has 350 MB."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "time_s": step / 10, "x": "y" * 400}) + "\n")
    inode, size = path.stat().st_ino, path.stat().st_size
    num_read = 0
    read = records.lines_backwards

    def counting(path: Path) -> Iterator[tuple[int, bytes]]:
        nonlocal num_read
        for offset, line in read(path):
            num_read += 1
            yield offset, line

    monkeypatch.setattr(recorder_module, "lines_backwards", counting)
    recorder = Recorder(tmp_path, replace(config, num_steps=30_000), clock=clock)
    recorder.start_from(19_990)
    recorder.record(19_991, "learner-0", {"reward/mean": 0.5})
    recorder.close()
    assert num_read < 20
    assert path.stat().st_ino == inode, "the file was not written again"
    assert path.stat().st_size < size
    written = rows(tmp_path)
    assert [row["step"] for row in written] == list(range(1, 19_992))
    assert written[-1]["reward/mean"] == 0.5


def test_an_event_that_cannot_be_written_is_one_error_and_no_traceback_of_a_thread(
    tmp_path: Path,
) -> None:
    program = f"""
import shutil
from async_rl.monitoring.event_file import EventFile
events = EventFile({str(tmp_path / "events")!r})
shutil.rmtree({str(tmp_path / "events")!r})
try:
    while True:
        events.text("a", "b", 1)
except OSError as error:
    print("once", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("once [Errno 2]")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "metrics.jsonl",
            b'{"step":1,"time_s":1}\n{"step":2,"ti\x00me_s":2}\n',
            r"line 2 of .*metrics\.jsonl is damaged .*remove this line, then async-rl resume",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(
    config: RunConfig, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        Recorder(tmp_path, config)


def test_numbers_that_a_power_loss_took_are_named(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.held.json").write_bytes(b"{")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1,"time_s":1}\n{"step":2,"ti')
    recorder = Recorder(tmp_path, config)
    recorder.start_from(3)
    recorder.close()
    assert "metrics.held.json is damaged" in caplog.text
    assert "metrics.jsonl has no row for step 2, 3" in caplog.text
