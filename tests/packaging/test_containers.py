"""The container recipes, as far as they can be checked without a container engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))

recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def instructions(recipe: Path) -> list[tuple[str, str]]:
    lines = [line for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def copied(recipe: Path) -> list[tuple[list[str], str]]:
    """The sources and the target of each COPY."""
    words = [rest.split()[1:] for name, rest in instructions(recipe) if name == "COPY"]
    return [(sources, target) for *sources, target in words]


def test_there_is_one_recipe_for_cpus_and_one_for_gpus() -> None:
    assert [recipe.stem for recipe in RECIPES] == ["cpu", "gpu"]
    assert "nvidia/cuda:13." in dict(instructions(RECIPES[1]))["FROM"]


@recipes
def test_every_copied_path_exists(recipe: Path) -> None:
    missing = [s for sources, _ in copied(recipe) for s in sources if not (ROOT / s).exists()]
    assert missing == []


@recipes
def test_the_last_user_is_not_root_and_owns_what_is_copied(recipe: Path) -> None:
    users = [rest for name, rest in instructions(recipe) if name == "USER"]
    assert users == ["trainer"]
    names = [name for name, _ in instructions(recipe)]
    assert names.index("USER") < names.index("COPY")
    assert all("--chown=trainer" in rest for name, rest in instructions(recipe) if name == "COPY")


@recipes
def test_shared_memory_and_the_jail_are_explained(recipe: Path) -> None:
    (command,) = re.findall(r"^#\s+docker run .*", recipe.read_text(), re.MULTILINE)
    assert "--shm-size=" in command
    assert "seccomp=unconfined" in command
    assert ("--gpus all" in command) == (recipe.stem == "gpu")


def test_the_copied_files_are_enough_for_the_command_line(tmp_path: Path) -> None:
    recipe, other = RECIPES
    assert copied(recipe) == copied(other)
    for each in RECIPES:
        made = [rest.split() for name, rest in instructions(each) if name == "RUN"]
        assert [words[1] for words in made if words[0] == "make"] == ["env"]
    for sources, target in copied(recipe):
        for source in sources:
            to = tmp_path / target if target != "./" else tmp_path / source
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, to)
    make = ["make", "--dry-run", "env", "PYTHON=python3"]
    planned = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    target = ["--target", str(tmp_path / "installed"), "."]
    subprocess.run([*install, *target], cwd=tmp_path, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.launchers.cli", "launch", "conf=ppo_code", "--dry-run"],
        cwd=tmp_path / "installed",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
