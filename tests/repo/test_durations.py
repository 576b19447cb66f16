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


def record() -> dict[str, float]:
    """150 modules of 0.1 to 90 s, as the suite has them."""
    rng = random.Random(1)
    return {f"tests/test_{number}.py": 0.1 * 900 ** rng.random() for number in range(150)}


def played(slowness: float, seed: int, *, noise: float = 0.12) -> dict[str, float]:
    """A run on a machine that is slower, each module with noise of its own."""
    rng = random.Random(seed)
    return {
        module: slowness * rng.uniform(1 - noise, 1 + noise) * took_s + rng.uniform(0, 2)
        for module, took_s in record().items()
    }


def named(seconds: dict[str, float]) -> list[str]:
    factor = durations.slowness(seconds, record())
    return durations.grown(seconds, record(), factor=factor)


@pytest.mark.parametrize("slowness", [0.4, 1.0, 2.0, 5.0])
def test_a_slow_or_fast_machine_fails_no_module_and_a_planted_one_is_named(slowness: float) -> None:
    expected = max(slowness, 1.0)
    for seed in range(50):
        seconds = played(slowness, seed)
        assert named(seconds) == []
        module = max(record(), key=record().__getitem__)
        assert record()[module] > 80
        assert named(seconds | {module: 1.6 * expected * record()[module]}) == [module]


def test_a_short_module_has_some_seconds_and_a_new_one_20() -> None:
    seconds = record()
    assert named(seconds | {"tests/test_new.py": 19.0}) == []
    assert named(seconds | {"tests/test_new.py": 21.0}) == ["tests/test_new.py"]
    short = min(seconds, key=seconds.__getitem__)
    assert named(seconds | {short: 19.0}) == []


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
    # As recorded in the workers; alone it fails at once, which does not make it fast.
    for seconds, expected in ((0.8, 0), (4, 1)):
        (tmp_path / "test_two.py").write_text(
            "import os, time\n"
            f"def test_it(): os.environ['PYTEST_XDIST_WORKER'] and time.sleep({seconds})\n"
        )
        assert run(*pytest_words)[0] == expected
    kind = durations.processor()
    recorded = tmp_path / "durations.toml"
    recorded.write_text(recorded.read_text().replace(kind, "another processor"))
    assert run(*pytest_words)[0] == 0
