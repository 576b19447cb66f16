"""The tables of reports show every value as it is."""

from __future__ import annotations

import pytest

from async_rl.launchers.commands.reports import print_report
from async_rl.runs.report import Report, Section, Table


def test_a_list_of_paths_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("data.train_files", "[]", "[/a/train.jsonl]")
    table = Table(columns=("", "one", "two"), rows=(row,))
    print_report(Report(title="", sections=(Section(table=table),)))
    assert "[/a/train.jsonl]" in capsys.readouterr().out
