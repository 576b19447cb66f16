"""A failure that does not repeat is listed and does not turn the run red; every other one does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.slow

UNSTEADY = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(NUMBER))
def test_once(number):
    mark = Path(__file__).with_name(f"mark-{number}")
    first = not mark.exists()
    mark.touch()
    print("the first time" if first else "the second time")
    assert not first, f"fails {number}"

def test_good(): pass
"""
BAD = "def test_bad(): assert False, 'always'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p unsteady\npythonpath = .\n")
    shutil.copy(ROOT / "tests" / "unsteady.py", tmp_path)
    (tmp_path / "unsteady.toml").write_text("# A list.\ntests = []\n")
    return tmp_path


def run(folder: Path, source: str, *words: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--repeat-failed", *words]
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def listed(folder: Path) -> list[str]:
    return list(tomllib.loads((folder / "unsteady.toml").read_text())["tests"])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_failures_that_do_not_repeat_are_shown_with_both_outputs_and_listed(
    folder: Path, workers: str
) -> None:
    code, text = run(folder, UNSTEADY.replace("NUMBER", "12"), "-n", workers)
    assert code == 0, text
    first, _, then = text.partition("test_it.py::test_once[3] passed then:")
    assert "test_it.py::test_once[3] failed first:" in first
    assert "fails 3" in first
    assert "the first time" in first
    assert "the second time" in then
    assert "1 passed, 12 unsteady in" in text.splitlines()[-1]
    assert listed(folder) == sorted(f"test_it.py::test_once[{number}]" for number in range(12))


def test_a_second_appearance_fails_and_the_other_tests_are_repeated_all_the_same(
    folder: Path,
) -> None:
    (folder / "unsteady.toml").write_text('tests = ["test_it.py::test_once[0]"]\n')
    code, text = run(folder, UNSTEADY.replace("NUMBER", "2"), "-n", "2")
    assert code == 1
    assert "1 failed, 1 passed, 1 unsteady in" in text.splitlines()[-1]
    assert len(listed(folder)) == 2


def test_a_failure_that_repeats_is_one_next_to_an_unsteady_test(folder: Path) -> None:
    code, text = run(folder, UNSTEADY.replace("NUMBER", "1") + BAD, "-n", "2")
    assert code == 1
    assert "1 failed, 1 passed, 1 unsteady in" in text.splitlines()[-1]
    assert listed(folder) == ["test_it.py::test_once[0]"]


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (BAD, "1 failed in"),
        ("import nothing_of_that_name\n", "1 error in"),
        ("import os\ndef test_crash(): os._exit(3)\n", "1 failed in"),
        ("import pytest\n@pytest.fixture\ndef a(): 1 / 0\ndef test_b(a): pass\n", "1 error in"),
        (
            "import pytest\n@pytest.fixture\ndef a():\n    yield\n    1 / 0\ndef test_b(a): pass\n",
            "1 passed, 1 error in",
        ),
    ],
    ids=["test", "import", "crash of the worker", "fixture", "end of a fixture"],
)
def test_a_real_failure_is_red(folder: Path, source: str, outcome: str) -> None:
    code, text = run(folder, source, "-n", "2")
    assert code != 0
    assert outcome in text.splitlines()[-1]
    assert listed(folder) == []
