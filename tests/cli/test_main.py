"""Facts about the script `async-rl`, its help, and how commands read their words and print."""

import re
import shlex

import pytest
import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from async_rl.launchers.commands.live import counts
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.report import Report, Section, Table

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


def test_texts_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("data.train_files", "[]", "[/a/train.jsonl]")
    table = Table(columns=("", "one", "two"), rows=(row,))
    section = Section(title="[/t]", lines=("sampled token 7 '[/b]'",), table=table)
    print_report(Report(title="", sections=(section,)))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/a/train.jsonl]", "'[/b]'", "[/t]"))


def test_each_word_is_a_pool_with_a_number() -> None:
    assert counts(["generators.big=3", "small=0"]) == {"generators.big": 3, "small": 0}
    for word in ("generators", "generators=-1"):
        with pytest.raises(ConfigError, match=f"{word}: is not of the form"):
            counts([word])
