"""The container recipes, as far as they can be checked without a container engine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def instructions(recipe: Path) -> list[tuple[str, str]]:
    lines = [line for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def copied(recipe: Path) -> list[tuple[list[str], str]]:
    """The sources and the target of each COPY."""
    words = [rest.split()[1:] for name, rest in instructions(recipe) if name == "COPY"]
    return [(sources, target) for *sources, target in words]


def test_there_is_one_recipe_for_cpus_and_one_for_gpus_which_copy_and_install_the_same() -> None:
    assert [recipe.stem for recipe in RECIPES] == ["cpu", "gpu"]
    assert "nvidia/cuda:13." in dict(instructions(RECIPES[1]))["FROM"]
    assert copied(RECIPES[0]) == copied(RECIPES[1])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_installs_what_it_copies_as_a_user_without_rights_and_explains_its_options(
    recipe: Path, tmp_path: Path
) -> None:
    users = [rest for name, rest in instructions(recipe) if name == "USER"]
    assert users == ["trainer"]
    names = [name for name, _ in instructions(recipe)]
    assert names.index("USER") < names.index("COPY")
    assert all("--chown=trainer" in rest for name, rest in instructions(recipe) if name == "COPY")
    (command,) = re.findall(r"^#\s+docker run .*", recipe.read_text(), re.MULTILINE)
    assert "--shm-size=" in command
    assert "seccomp=unconfined" in command
    assert ("--gpus all" in command) == (recipe.stem == "gpu")
    made = [rest.split() for name, rest in instructions(recipe) if name == "RUN"]
    assert [words[1] for words in made if words[0] == "make"] == ["env"]
    # test_wheel.py installs from these files.
    for source in (source for sources, _ in copied(recipe) for source in sources):
        assert (ROOT / source).exists(), source
        if (ROOT / source).is_file():
            shutil.copy(ROOT / source, tmp_path / source)
    make = ["make", "--dry-run", "env", "PYTHON=python3"]
    planned = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
