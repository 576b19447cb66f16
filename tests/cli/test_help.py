"""Facts about --help."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from async_rl.launchers.cli import application

GROUP = typer.main.get_command(application())
COMMANDS = {
    **{name: command for name, command in GROUP.commands.items() if name != "data"},
    **{f"data {name}": command for name, command in GROUP.commands["data"].commands.items()},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_examples_with_options_that_it_has(name: str) -> None:
    command = COMMANDS[name]
    found = re.findall(r"Examples: (.*)", command.help, re.DOTALL)
    assert len(found) == 1
    known = {option for parameter in command.params for option in parameter.opts}
    for example in found[0].split(";"):
        words = shlex.split(example)
        path = name.split()
        assert words[: 1 + len(path)] == ["async-rl", *path]
        assert {word for word in words if word.startswith("--")} <= known
