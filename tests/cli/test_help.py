"""Facts about --help and the completion of words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from async_rl.launchers.cli import app
from async_rl.launchers.commands import options
from async_rl.launchers.commands.options import complete_run

GROUP = typer.main.get_command(app)
COMMANDS = {
    " ".join(path): command
    for path, command in [
        *(
            ((name,), command)
            for name, command in GROUP.commands.items()
            if not hasattr(command, "commands")
        ),  # type: ignore[attr-defined]
        *(
            ((group, name), command)
            for group, inner in GROUP.commands.items()  # type: ignore[attr-defined]
            if hasattr(inner, "commands")
            for name, command in inner.commands.items()
        ),
    ]
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_examples_with_options_that_it_has(name: str) -> None:
    command = COMMANDS[name]
    found = re.findall(r"Examples: (.*)", command.help, re.DOTALL)
    assert len(found) == 1
    known = {option for parameter in command.params for option in parameter.opts}
    for example in found[0].split(";"):
        words = shlex.split(example)
        path = name.removesuffix(" serve").split()  # the verifier's command that may be left out
        assert words[: 1 + len(path)] == ["async-rl", *path]
        assert {word for word in words if word.startswith("--")} <= known


def test_runs_are_completed_by_their_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("amber-otter", "calm-bear"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
    monkeypatch.setattr(options, "default_output_dir", lambda: tmp_path)
    assert complete_run("am") == ["amber-otter"]
    assert set(complete_run("")) == {"amber-otter", "calm-bear"}


def test_the_program_offers_to_install_completion() -> None:
    assert {"--install-completion", "--show-completion"} <= {
        option for parameter in GROUP.params for option in parameter.opts
    }
