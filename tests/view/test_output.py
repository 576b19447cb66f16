"""The help and the output of commands, also on terminals that lack letters or width."""

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from async_rl.core.errors import ConfigError
from async_rl.launchers import cli
from async_rl.launchers.commands.live import counts
from async_rl.launchers.commands.reports import print_report
from async_rl.monitoring.terminal import open_table
from async_rl.runs.report import Report, Section, Table

GROUP = typer.main.get_command(cli.application())
COMMANDS = {
    **{name: command for name, command in GROUP.commands.items() if name != "data"},
    **{f"data {name}": command for name, command in GROUP.commands["data"].commands.items()},
}
READING = (
    *(["status", "one"], ["logs", "one"], ["ledger", "one"], ["ledger", "one", "--step", "1"]),
    *(["ledger", "one", "--audit"], ["certify", "one"], ["rollouts", "one"], ["explain", "one"]),
    *(["plan", "one"], ["compare", "one", "two"], ["doctor"]),
)


def printed(words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command with streams of this encoding; a letter that it lacks would raise."""
    out = io.BytesIO()
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(out, encoding=encoding, errors="strict", write_through=True)
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["async-rl", *words])
    with pytest.raises(SystemExit):
        cli.run(cli.application())
    sys.stdout.flush()
    return out.getvalue().decode(encoding)


def test_every_command_prints_in_an_encoding_without_our_signs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    for name in COMMANDS:
        said = printed([*name.split(), "--help"], "ascii", monkeypatch)
        assert "Examples: async-rl" in said, name
    for words in READING:
        place = [] if words == ["doctor"] else ["--output-dir", "."]
        assert "Error" not in printed([*words, *place], "ascii", monkeypatch), words
    runs = printed(["runs", "--output-dir", "."], "ascii", monkeypatch)
    assert "one  finished" in runs
    assert "0.750 +- 0.050" in runs
    # A letter of a response that an encoding lacks is shown by its number.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    app = typer.Typer()

    @app.command()
    def show() -> None:
        typer.echo("5 – 6: 答")

    monkeypatch.setattr(sys, "argv", ["async-rl"])
    with pytest.raises(SystemExit):
        cli.run(app)
    sys.stdout.seek(0)
    assert sys.stdout.read() == "5 - 6: \\u7b54\n"


def test_a_table_that_does_not_fit_is_shown_row_by_row_and_cuts_no_word() -> None:
    table = open_table("run", "", "held-out")
    table.add_row("kind-badger-1126-1221", "", "0.453 ± 0.061")
    table.add_row("keen-lemur", "live", "0.4")
    wide, narrow = (Console(file=io.StringIO(), width=width) for width in (60, 36))
    for console in (wide, narrow):
        console.print(table)
    lines = [line.rstrip() for line in wide.file.getvalue().splitlines()]
    assert lines[2] == "keen-lemur             live  0.4"
    blocks = [line.split() for line in narrow.file.getvalue().splitlines() if line.strip()]
    assert blocks[0] == ["run", "kind-badger-1126-1221"]
    assert blocks[-3:] == [["run", "keen-lemur"], ["live"], ["held-out", "0.4"]]


def test_a_path_that_cannot_be_used_and_a_damaged_run_are_one_line(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    export = ["rollouts", str(directory / "one"), "--export", f"{tmp_path}/file/x.jsonl"]
    said = "Not a directory; check the path, its permissions and the disk"
    assert printed(export, "utf-8", monkeypatch) == f"error: {tmp_path}/file/x.jsonl: {said}\n"
    said = f"no run in {tmp_path}/file"
    assert said in printed(["runs", "--output-dir", str(tmp_path / "file")], "utf-8", monkeypatch)
    shutil.copytree(directory / "one", tmp_path / "damaged")
    (tmp_path / "damaged" / "config.yaml").write_text("garbage")
    runs = printed(["runs", "--output-dir", str(tmp_path)], "utf-8", monkeypatch)
    assert "damaged  finished" in runs


def test_a_view_without_its_directory_or_its_package_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["view", "--output-dir", str(directory / "nowhere")]
    assert "nowhere does not exist; give --output-dir" in printed(words, "utf-8", monkeypatch)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "async_rl.runs.view.server", raising=False)
    words = ["view", "one", "--output-dir", str(directory)]
    assert "pip install 'async-rl[view]'" in printed(words, "utf-8", monkeypatch)


def test_the_help_of_a_command_has_examples_with_options_that_it_has() -> None:
    for name, command in COMMANDS.items():
        (examples,) = re.findall(r"Examples: (.*)", command.help, re.DOTALL)
        known = {option for parameter in command.params for option in parameter.opts}
        for example in examples.split(";"):
            words = shlex.split(example)
            path = name.split()
            assert words[: 1 + len(path)] == ["async-rl", *path]
            assert {word for word in words if word.startswith("--")} <= known, example


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
