"""The preparation of a run as the supervisor sees it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from async_rl.core.errors import RunFailed
from async_rl.supervision.preparation import prepare

START = """echo '{"fraction": 1, "text": "model ready", "path": "/the/model"}'"""
COUNTED = """echo '{"fraction": 0.5, "text": "5 of 10 prompts"}'"""


def prepared(
    run_dir: Path, child: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[tuple[float, str]]]:
    """The model's directory and the progress, with these lines of a shell as the child."""
    (run_dir / "logs").mkdir()
    script = run_dir / "child"
    script.write_text(f"#!/bin/sh\n{child}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    seen: list[tuple[float, str]] = []
    return asyncio.run(prepare(run_dir, lambda *step: seen.append(step))), seen


def test_a_preparation_reports_its_progress_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = prepared(tmp_path, f"{COUNTED}\n{START}", monkeypatch)
    assert model == Path("/the/model")
    assert seen == [(0.5, "5 of 10 prompts"), (1, "model ready")]


@pytest.mark.parametrize(
    ("child", "cause"),
    [
        ('echo \'{"error": "DataError: row 3 is bad"}\'\nexit 1', "^DataError: row 3 is bad$"),
        (f"{COUNTED}\nkill -9 $$", "exited with code -9; see "),
        (COUNTED, "exited with code 0; see "),
    ],
)
def test_a_preparation_that_fails_ends_the_run_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, cause: str
) -> None:
    with pytest.raises(RunFailed, match=cause):
        prepared(tmp_path, child, monkeypatch)
