"""The live line, the plain lines and the status table, as text."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import members
import pytest
from rich.console import Console as RichConsole
from tables import table
from unread_output import run_unread

from async_rl.composition.compose import compose, write_config
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console, who_waits
from async_rl.monitoring.rates import Rates
from async_rl.monitoring.status import render
from async_rl.monitoring.terminal import Terminal
from async_rl.protocol.supervisor import Member
from async_rl.runs.status import result_lines
from async_rl.training import checkpoints

NOW = 1000.0


def member(name: str, *counters: dict[str, float], **facts: Any) -> Member:
    return members.member(name, *counters, **{"pid": 42, "since_s": NOW, **facts})


class Screen:
    """A console whose output and clock the test holds."""

    def __init__(self, config: RunConfig, run_dir: Path, *, is_terminal: bool = False) -> None:
        self.out = io.StringIO()
        self.now = 0.0
        look: Any = {"width": 100, "highlight": False, "no_color": True, "legacy_windows": False}
        self.terminal = Terminal(file=self.out, force_terminal=is_terminal, **look)
        clocks: Any = {"clock": lambda: self.now, "wall": lambda: NOW + self.now}
        self.console = Console(config, run_dir, terminal=self.terminal, **clocks)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def live_line(config: RunConfig, run_dir: Path, step: int, *shown: Any, **facts: int) -> str:
    """The line of a run of 60 steps."""
    screen = Screen(config.model_copy(update={"num_steps": 60}), run_dir)
    screen.console.progress(step, *shown, **facts)
    return " ".join(screen.lines)


def test_the_live_line_has_the_numbers_and_who_waits(config: RunConfig, tmp_path: Path) -> None:
    metrics = {
        "reward/mean": 0.406,
        "eval/pass_at_1": 0.5625,
        "staleness/max_versions": 2.0,
        "throughput/generated_tokens_per_s": 9841.0,
    }
    processes = [member("learner-0", state="waiting", waits_for="a batch", since_s=NOW - 3)]
    assert live_line(config, tmp_path, 12, metrics, processes, evaluated_step=10) == (
        "step 12/60  reward 0.41  held-out 0.56 @10  staleness 2  9.8k tokens/s  learner-0 waits"
        " for a batch (3 s)"
    )
    assert live_line(config, tmp_path, 0, {}, []) == "step 0/60"
    # Before the first step the commonest failure.
    failures = {"failures/reward_failed": 41.0, "failures/generator_lost": 2.0, "busy_s": 30.0}
    facts = {"state": "blocked", "waits_for": "scoring: judge:80 answers 500", "since_s": NOW - 9}
    held = member("generator-0", failures, **facts)
    rates = Rates(start_s=0.0)
    rates.observe([held])
    assert live_line(config, tmp_path, 0, rates.now(), [held]) == (
        "step 0/60  43 failed, 41 of them: reward_failed  generator-0 is held"
        " back by scoring: judge:80 answers 500 (9 s)"
    )


@pytest.mark.parametrize(("processes", "told"), table(__file__, "waits"))
def test_the_process_that_explains_the_wait_is_named(
    processes: dict[str, dict[str, Any]], told: str
) -> None:
    listed = [member(name, **facts) for name, facts in processes.items()]
    assert who_waits(listed, now_s=NOW, least_s=1.0) == told


def test_elsewhere_a_plain_line_comes_every_five_seconds(config: RunConfig, tmp_path: Path) -> None:
    screen = Screen(config, tmp_path)
    for step in range(12):
        screen.console.progress(step, {}, [])
        screen.now += 1
    assert screen.lines == ["step 0/4", "step 5/4", "step 10/4"]
    # The end of preparing is told even if it took no time.
    screen = Screen(config, tmp_path)
    for share, text in ((0.0, "corpus"), (0.5, "warm start"), (1.0, "model ready")):
        screen.console.preparing(share, text)
    assert screen.lines == [
        "preparing the model   0%  corpus",
        "preparing the model 100%  model ready",
    ]


def test_the_end_says_what_a_run_achieved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"step": 0, "time_s": 3.0, "eval/pass_at_1": 0.25, "eval/pass_at_1_error": 0.06},
        *({"step": step, "time_s": 2.0 * step, "reward/mean": step / 40} for step in range(1, 41)),
    ]
    rows[30] |= {"eval/pass_at_1": 0.75, "eval/pass_at_1_error": 0.05}
    rows[40] |= {"eval/pass_at_1": 0.5, "eval/pass_at_1_error": 0.05}
    lines = [json.dumps(row) for row in rows]
    # A step that was trained again after a crash counts once, and half a line not at all.
    repeated = json.dumps(rows[40] | {"time_s": 95.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, repeated, '{"step": 4']))
    monkeypatch.setattr(checkpoints, "versions", lambda _: [20, 40])
    name = tmp_path.name
    write_config(compose("grpo_code", ["num_steps=40"]), tmp_path / "config.yaml")
    lines = list(result_lines(tmp_path))
    assert lines == [
        "held-out pass@1 0.250 ± 0.060 at step 0, 0.500 ± 0.050 at step 40, best 0.750 ± 0.050 at"
        " step 30",
        "reward          0.075 to 0.950 (means of the first and the last 5 steps)",
        "time            1 min 35 s",
        "checkpoints     steps 20, 40; the best of them by held-out pass@1 is step 40",
        f"numbers         {tmp_path}/metrics.jsonl",
        f"look at it      async-rl view {name}; async-rl rollouts {name}",
        f"continue        async-rl resume {name} num_steps=80; async-rl eval {name}; async-rl"
        f" export {name} model/",
    ]


def test_a_run_without_a_checkpoint_has_another_end(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 2, "policy/lr": 0.5}\n')
    screen = Screen(config, tmp_path)
    screen.console.end("failed", "learner-0: the loss is not finite", 1)
    assert screen.lines == [
        "the run has failed at step 1 of 4",
        "learner-0: the loss is not finite",
    ]
    lines = list(result_lines(tmp_path))
    assert "checkpoints     none: the run stopped before its first checkpoint" in lines
    assert not any("resume" in line for line in lines)
    (tmp_path / "service").mkdir()
    lines = list(result_lines(tmp_path))
    assert lines == ["time            2 s", f"continue        async-rl resume {tmp_path.name}"]


def test_the_line_says_how_long_a_run_still_takes(config: RunConfig, tmp_path: Path) -> None:
    screens = []
    for own in (replace(config, num_steps=100), compose("serve")):
        screens.append(screen := Screen(own, tmp_path))
        for step in range(9):
            screen.console.progress(step, {}, [])
            screen.now += 6
    screen, of_service = screens
    assert not any("left" in line for line in of_service.lines)
    assert screen.lines[1] == "step 1/100", "one step has no pace"
    assert screen.lines[-1] == "step 8/100  about 9 min 12 s left"
    screen.console.progress(3, {}, [])
    assert screen.lines[-1] == "step 3/100", "the learner went back to a checkpoint"


def test_on_a_terminal_the_line_is_redrawn_in_place(config: RunConfig, tmp_path: Path) -> None:
    screen = Screen(config, tmp_path, is_terminal=True)
    screen.console.preparing(0.5, "warm start")
    screen.now += 1
    screen.console.progress(1, {"reward/mean": 0.25}, [])
    screen.console.note("generator-0 came back")
    screen.now += 1
    screen.console.progress(2, {"reward/mean": 0.5}, [])
    screen.console.end("finished", "", 4)
    text = screen.out.getvalue()
    assert "warm start" in text
    assert "reward 0.50" in text
    assert text.count("generator-0 came back") == 1
    assert "\x1b[2K" in text, "the line is erased before it is drawn anew"


def test_status_lists_every_process_with_what_it_waits_for() -> None:
    held = {"state": "blocked", "waits_for": "admission: 48 of 48", "since_s": NOW - 2}
    answer = members.reply(
        [
            member("verifier-0", state="serving"),
            member("generator-0", version=11, **held),
            member("learner-0", state="training", since_s=NOW - 1, version=12),
        ],
        started_s=NOW - 95,
        tensorboard_url="http://127.0.0.1:6006/",
        metrics={"reward/mean": 0.5, "throughput/generated_tokens_per_s": 9841.2},
    )
    out = io.StringIO()
    RichConsole(file=out, width=120).print(render(answer, now_s=NOW))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == [
        "r  step 3 of 9, running for 1 min 35 s",
        "/r",
        "TensorBoard http://127.0.0.1:6006/",
        "reward 0.500  generated tokens/s 9,841",
        "process      pid  state     version  since  at work  rate  waits for",
        "learner-0    42   training  12       1 s",
        "generator-0  42   blocked   11       2 s                   admission: 48 of 48",
        "verifier-0   42   serving            0 s",
    ]


@pytest.mark.parametrize(("is_terminal", "error"), [(False, errno.EPIPE), (True, errno.EIO)])
def test_a_terminal_that_is_gone_ends_neither_the_process_nor_its_other_output(
    config: RunConfig, tmp_path: Path, is_terminal: bool, error: int
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))

    screen = Screen(config, tmp_path, is_terminal=is_terminal)
    screen.console.note("before")
    screen.terminal.file = Gone()
    for _ in range(2):
        screen.now += 10
        screen.console.note("after")
        screen.console.progress(1, {}, [])
    screen.console.end("finished", "", 1)
    assert "before" in screen.out.getvalue()


def test_a_run_whose_output_nobody_reads_goes_on_and_exits_as_it_ends() -> None:
    program = """
import pathlib, sys, tempfile
from async_rl.composition.compose import compose
from async_rl.monitoring.console import Console
console = Console(compose('grpo_code', []), pathlib.Path(tempfile.gettempdir()))
sys.stdin.readline()
for _ in range(3):
    console.note('a line that nobody reads')
console.end('finished', '', 1)
sys.exit(7)
"""
    assert run_unread(program) == (7, b"")
