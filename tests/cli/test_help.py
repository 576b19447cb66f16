"""Facts about --help and the completion of words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from async_rl.launchers import options
from async_rl.launchers.cli import app
from async_rl.launchers.options import complete_run, complete_setting

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]
WITH_EXAMPLES = ("launch", "status", "stop", "resume", "export", "ledger", "logs", "rollouts", "doctor", "init", "verifier", "verify")


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_help_of_a_command_has_examples_with_options_that_it_has(name: str) -> None:
    command = COMMANDS[name]
    found = re.findall(r"Examples: (.*)", command.help)
    assert len(found) == 1
    known = {option for parameter in command.params for option in parameter.opts}
    for example in found[0].split(";"):
        program, called, *words = shlex.split(example)
        assert (program, called) == ("async-rl", name)
        assert {word for word in words if word.startswith("--")} <= known


def test_settings_and_configurations_are_completed() -> None:
    assert complete_setting("conf=p") == ["conf=ppo_code"]
    assert complete_setting("buffer.max_st") == ["buffer.max_staleness_versions="]
    assert complete_setting("nothing") == []


def test_runs_are_completed_by_their_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("amber-otter", "calm-bear"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
    monkeypatch.setattr(options, "default_output_dir", lambda: tmp_path)
    assert complete_run("am") == ["amber-otter"]
    assert set(complete_run("")) == {"amber-otter", "calm-bear"}


def test_the_program_offers_to_install_completion() -> None:
    assert {"--install-completion", "--show-completion"} <= {option for parameter in GROUP.params for option in parameter.opts}
