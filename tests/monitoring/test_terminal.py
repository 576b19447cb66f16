"""The live line, the plain lines and the end of a run, as text."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import members
import pytest
from rich.table import Table
from rich.text import Text
from tables import table
from unread_output import run_unread

from async_rl.composition.compose import compose, write_config
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console, who_waits
from async_rl.monitoring.rates import Rates
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


def test_control_characters_are_shown_and_not_sent_in_every_form() -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07\x9d0;title\x9c\x7f\r"
    text = Text(hostile, style="red")
    grid = Table("response")
    grid.add_row(text)
    for form in (grid, text, hostile):
        out = io.StringIO()
        terminal = Terminal(file=out, force_terminal=True, color_system="standard", width=120)
        terminal.print(form, markup=False, highlight=False)
        shown = out.getvalue()
        assert "␛]52;c;" in shown
        assert not {"\x07", "\x7f", "\x9d", "\r"} & set(shown)
        assert "\x1b]" not in shown
        # rich's own colours are kept
        assert isinstance(form, str) or "\x1b[31m" in shown
