"""A failure that does not repeat is listed and does not turn the run red; every other one does, and
so does a module that grows by 30 percent, also on a slow machine.
"""

import os
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import durations
import pytest
from repository import ROOT

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_real_failures_and_a_second_appearance_are_red_next_to_an_unsteady_test(
    tmp_path: Path,
) -> None:
    sources = BAD | {"it": UNSTEADY.replace("NUMBER", "2") + BAD["test"]}
    code, text = run(tmp_path, sources, 2, known='"test_it.py::test_once[0]"')
    assert code == 1
    assert "4 failed, 2 passed, 2 errors, 1 unsteady in" in text.splitlines()[-1], text
    assert len(listed(tmp_path)) == 2


@pytest.mark.slow
def test_a_failed_import_is_red(tmp_path: Path) -> None:
    code, text = run(tmp_path, {"it": "import nothing_of_that_name\n"}, 2)
    assert code != 0
    assert "1 error in" in text.splitlines()[-1]


RECORD = {f"tests/test_{number}.py": 0.6 * number for number in range(1, 151)}
"""Modules of 0.6 to 90 s."""
LONGEST, SHORT = "tests/test_150.py", "tests/test_1.py"


def played(slowness: float, seed: int, *, noise: float = 0.12) -> dict[str, float]:
    """A run on a machine that is slower, each module with noise of its own."""
    rng = random.Random(seed)
    return {
        module: slowness * rng.uniform(1 - noise, 1 + noise) * took_s + rng.uniform(0, 2)
        for module, took_s in RECORD.items()
    }


def named(seconds: dict[str, float]) -> list[str]:
    return durations.grown(seconds, RECORD, factor=durations.slowness(seconds, RECORD))


@pytest.mark.parametrize("slowness", [0.4, 1.0, 2.0, 5.0])
def test_a_slow_or_fast_machine_fails_no_module_and_a_planted_one_is_named(slowness: float) -> None:
    planted_s = 1.6 * max(slowness, 1.0) * RECORD[LONGEST]
    for seed in range(50):
        seconds = played(slowness, seed)
        assert named(seconds) == []
        assert named(seconds | {LONGEST: planted_s}) == [LONGEST]


def test_a_short_module_has_some_seconds_and_a_new_one_20() -> None:
    assert named(RECORD | {"tests/test_new.py": 19.0, SHORT: 19.0}) == []
    assert named(RECORD | {"tests/test_new.py": 21.0}) == ["tests/test_new.py"]


@pytest.mark.slow
def test_the_command_fails_a_slow_module_and_records_it_when_asked(tmp_path: Path) -> None:
    source = (ROOT / "tests" / "durations.py").read_text()
    (tmp_path / "durations.py").write_text(
        re.sub(r"^LEAST_S = .*", "LEAST_S = 0.5", source, flags=re.M)
    )
    options = f"addopts = {LIGHT} -p durations\npythonpath = .\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{options}")
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass\n")

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    pytest_words = ("-m", "pytest", "-n", "2", "--check-durations")
    assert run(*pytest_words)[0] == 0
    assert run("durations.py")[0] == 0
    (tmp_path / "test_two.py").write_text("import time\ndef test_it(): time.sleep(0.8)\n")
    code, text = run(*pytest_words)
    assert code == 1, text
    assert re.search(r"^test_two.py took 1 s instead of 0 s", text, re.M), text
    assert "test_one.py took" not in text
    assert run("durations.py", "test_two.py")[0] == 0
    # Slow in the workers only; alone it fails at once, which does not make it fast.
    (tmp_path / "test_two.py").write_text(
        "import os, time\ndef test_it(): os.environ['PYTEST_XDIST_WORKER'] and time.sleep(4)\n"
    )
    assert run(*pytest_words)[0] == 1
    kind = durations.processor()
    recorded = tmp_path / "durations.toml"
    recorded.write_text(recorded.read_text().replace(kind, "another processor"))
    assert run(*pytest_words)[0] == 0
