"""The tables of `async-rl compare` show every value as it is."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from async_rl.launchers.commands import compare


def test_a_list_of_paths_is_shown_as_it_is() -> None:
    lines = {"data.train_files": ("[]", "[/a/train.jsonl]")}
    out = io.StringIO()
    Console(file=out, width=100).print(compare._table((Path("one"), Path("two")), lines))
    assert "[/a/train.jsonl]" in out.getvalue()
