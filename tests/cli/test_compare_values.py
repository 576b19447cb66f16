"""Reports on the terminal show every value as it is."""

from __future__ import annotations

import pytest

from async_rl.launchers.commands.reports import print_report
from async_rl.runs.report import Report, Section, Table


def test_texts_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("data.train_files", "[]", "[/a/train.jsonl]")
    table = Table(columns=("", "one", "two"), rows=(row,))
    section = Section(title="[/t]", lines=("sampled token 7 '[/b]'",), table=table)
    print_report(Report(title="", sections=(section,)))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/a/train.jsonl]", "'[/b]'", "[/t]"))
