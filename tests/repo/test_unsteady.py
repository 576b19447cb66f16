"""A failure that does not repeat is listed and does not turn the run red; every other one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

SECOND_TIME = """
from pathlib import Path
def test_once(): 
    mark = Path(__file__).with_name("mark")
    first = not mark.exists()
    mark.touch()
    assert not first, "only the first time"
def test_good(): pass
"""


def run(folder: Path, source: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "unsteady", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_failure_that_does_not_repeat_is_listed(tmp_path: Path) -> None:
    code, text = run(tmp_path, SECOND_TIME)
    assert code == 0, text
    assert "test_it.py::test_once failed first:" in text
    assert "only the first time" in text
    assert "1 passed, 1 unsteady in" in text.splitlines()[-1]


@pytest.mark.slow
def test_a_failure_that_repeats_is_one(tmp_path: Path) -> None:
    code, text = run(tmp_path, "def test_bad(): assert False\ndef test_good(): pass\n")
    assert code == 1
    assert "1 failed, 1 passed in" in text.splitlines()[-1]
