"""Facts about the script `async-rl`, its help, and how commands read their words and print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from async_rl.launchers.commands.live import counts
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.report import Report, Section, Table

RUN = """
import sys
sys.argv = ["async-rl", *{arguments}]
from async_rl.launchers.main import main
try:
    main()
except SystemExit as end:
    commands = [name for name in sys.modules if name.startswith("async_rl.launchers.commands.")]
    print(end.code, sorted(name.rpartition(".")[2] for name in commands))
"""


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = RUN.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_a_command_starts_without_the_modules_of_the_others() -> None:
    done = ended("verifier", "num_steps=3")
    assert done.stdout.splitlines()[-1] == "2 ['options', 'verifier']"
    assert done.stderr.startswith("error: num_steps=3: without a run only sandbox.*")
    all_known = ended("verifie")
    assert all_known.stdout.splitlines()[-1].startswith("2 ['data', 'doctor'")


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    interrupt = """
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
import sys
sys.meta_path.insert(0, Interrupt())
"""
    script = interrupt + RUN.format(arguments=["status"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("130 []\n", "")


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
    for words, reason in (
        (["generators"], "generators: is not of the form"),
        (["generators=-1"], "generators=-1: is not of the form"),
    ):
        with pytest.raises(ConfigError, match=reason):
            counts(words)
