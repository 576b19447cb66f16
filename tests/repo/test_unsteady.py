"""A failure that does not repeat is listed and does not turn the run red; every other one does."""

import os
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
BAD = {
    "test": "def test_bad(): assert False, 'always'\n",
    "crash": "import os\ndef test_crash(): os._exit(3)\n",
    "fixture": "import pytest\n@pytest.fixture\ndef a(): 1 / 0\ndef test_b(a): pass\n",
    "end": (
        "import pytest\n@pytest.fixture\ndef a():\n    yield\n    1 / 0\ndef test_b(a): pass\n"
    ),
}
"""Modules with one failure each: of a test, a worker, a fixture, its end."""
LIGHT = "-p no:hydra_pytest -p no:hypothesispytest -p no:anyio"
"""Each of the many processes would import these plug-ins for two seconds."""


def run(folder: Path, sources: dict[str, str], workers: int, known: str = "") -> tuple[int, str]:
    """Return the exit code and the output of modules of these names. known: an unsteady test."""
    source = (ROOT / "tests" / "unsteady.py").read_text()
    # As many modules as are to fail twice.
    source = source.replace("MOST_REPEATED = 3", "MOST_REPEATED = 9")
    (folder / "unsteady.py").write_text(source)
    (folder / "unsteady.toml").write_text(f"# A list.\ntests = [{known}]\n")
    options = f"addopts = {LIGHT} -p unsteady\npythonpath = .\n"
    (folder / "pytest.ini").write_text(f"[pytest]\n{options}")
    for name, text in sources.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--repeat-failed"]
    command += ["-n", str(workers)]
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def listed(folder: Path) -> list[str]:
    return list(tomllib.loads((folder / "unsteady.toml").read_text())["tests"])


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_that_do_not_repeat_are_shown_with_both_outputs_and_listed(
    tmp_path: Path, workers: int
) -> None:
    code, text = run(tmp_path, {"it": UNSTEADY.replace("NUMBER", "12")}, workers)
    assert code == 0, text
    first, _, then = text.partition("test_it.py::test_once[3] passed then:")
    assert "test_it.py::test_once[3] failed first:" in first
    assert "fails 3" in first
    assert "the first time" in first
    assert "the second time" in then
    assert "1 passed, 12 unsteady in" in text.splitlines()[-1]
    assert listed(tmp_path) == sorted(f"test_it.py::test_once[{number}]" for number in range(12))


def test_real_failures_and_a_second_appearance_are_red_next_to_an_unsteady_test(
    tmp_path: Path,
) -> None:
    sources = BAD | {"it": UNSTEADY.replace("NUMBER", "2") + BAD["test"]}
    code, text = run(tmp_path, sources, 2, known='"test_it.py::test_once[0]"')
    assert code == 1
    assert "4 failed, 2 passed, 2 errors, 1 unsteady in" in text.splitlines()[-1], text
    assert len(listed(tmp_path)) == 2


def test_a_failed_import_is_red(tmp_path: Path) -> None:
    code, text = run(tmp_path, {"it": "import nothing_of_that_name\n"}, 2)
    assert code != 0
    assert "1 error in" in text.splitlines()[-1]
