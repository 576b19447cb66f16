"""A module that grows by 30 percent fails the run, also on a slow machine."""

import random
import re
import subprocess
import sys
from pathlib import Path

import durations
import pytest
from repository import ROOT
from test_unsteady import LIGHT

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
