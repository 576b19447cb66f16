"""Without the packages of an extra, everything else works, and the rest names the extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from async_rl.core.extras import EXTRA_OF

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # an import of None fails like a missing package
from async_rl.launchers import cli
sys.argv = ["async-rl", *{words!r}]
cli.main()
"""
TRAINING = sorted(package for package, extra in EXTRA_OF.items() if extra != "verifier")


def without(packages: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `async-rl` where these packages are not installed."""
    code = BLOCKED.format(packages=packages, words=words)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_programs_are_judged_without_any_package_of_training(tmp_path: Path) -> None:
    row = {"prompt": "", "completion": "def f(a): return a", "test_list": ["assert f(1) == 1"]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    done = without(TRAINING, "verify", str(file))
    assert done.returncode == 0, done.stderr
    assert "pass" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["verifier", "--help"]])
def test_help_needs_no_extra(words: list[str]) -> None:
    assert without(sorted(EXTRA_OF), *words).returncode == 0


@pytest.mark.parametrize(("package", "words", "message"), table(__file__, "missing"))
def test_the_extra_of_a_missing_package_is_named(
    package: str, words: list[str], message: str
) -> None:
    done = without([package], *words)
    assert done.returncode == 2
    assert f"error: {message}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_engine_of_transformers_needs_no_vllm(tmp_path: Path) -> None:
    words = ["launch", "conf=grpo_code", "generation.engine=hf", "--dry-run"]
    assert without(["vllm", "ray", "wandb"], *words).returncode == 0
