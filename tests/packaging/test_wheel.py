"""The source distribution and the wheel contain everything that a user runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import async_rl

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
WHERE = """
import async_rl, async_rl.launchers, async_rl.sandbox, async_rl.conf
for package in (async_rl, async_rl.launchers, async_rl.sandbox, async_rl.conf):
    print(package.__file__)
"""


def build(kind: str, source: Path, target: Path) -> Path:
    """Build `build_sdist` or `build_wheel` of a source tree; return the file."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files; the wheel was built from the source distribution."""
    folder = tmp_path_factory.mktemp("packaging")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    sdist = build("build_sdist", folder / "checkout", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build("build_wheel", unpacked, folder)
    target = folder / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True, timeout=120)
    return target


CLI = ("-m", "async_rl.launchers.cli")


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the installed wheel in an empty folder, without the checkout."""
    empty = installed.parent / "empty"
    empty.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *words],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_installed_files_are_those_of_the_wheel(installed: Path) -> None:
    result = run(installed, "-c", WHERE)
    assert result.returncode == 0
    assert all(line.startswith(str(installed)) for line in result.stdout.splitlines())


def test_the_wheel_names_its_version_license_and_types(installed: Path) -> None:
    (metadata,) = installed.glob("async_rl-*.dist-info")
    text = (metadata / "METADATA").read_text()
    assert f"\nVersion: {async_rl.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert list(metadata.rglob("LICENSE"))
    assert (installed / "async_rl" / "py.typed").is_file()


def test_every_file_of_the_product_is_installed(installed: Path) -> None:
    expected = {
        path.relative_to(ROOT)
        for folder in ("async_rl", "launchers", "sandbox", "conf")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = [
        str(path)
        for path in sorted(expected)
        if not (installed / ("" if path.parts[0] == "async_rl" else "async_rl") / path).is_file()
    ]
    assert missing == []


def test_dry_run_of_the_installed_command(installed: Path) -> None:
    result = run(installed, *CLI, "launch", "conf=grpo_code", "--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "learner-0" in result.stdout


def test_the_installed_command_reads_a_foreign_script(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "N=3\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$((N * 2))\n"
    )
    done = run(installed, *CLI, "migrate", str(script), "--output", str(tmp_path / "own.yaml"))
    assert "actor_rollout_ref.rollout.n=6" in done.stdout, done.stderr


def test_a_verifier_of_the_installed_command_judges_programs(
    installed: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "problems.jsonl"
    with rows.open("w") as file:
        for operator in "+-":
            program = f"def f(a, b):\n    return a {operator} b"
            row = {"prompt": "add", "completion": program, "test_list": ["assert f(1, 2) == 3"]}
            file.write(json.dumps(row) + "\n")
    result = run(installed, *CLI, "verify", str(rows))
    verdicts = [line.split()[0] for line in result.stdout.splitlines()[:2]]
    assert verdicts == ["pass", "wrong_answer"], result.stdout + result.stderr
