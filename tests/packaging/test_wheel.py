"""The source distribution and the wheel contain everything that a user runs. They are made from the
files that the recipe of a container copies; the recipes are checked as far as they can be without a
container engine.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import async_rl

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))
PROGRAM = """
import async_rl, async_rl.launchers, async_rl.sandbox, async_rl.conf, sys
from async_rl.launchers.cli import main
for package in (async_rl, async_rl.launchers, async_rl.sandbox, async_rl.conf):
    assert package.__file__.startswith(sys.argv[1]), package
commands = (
    "launch conf=grpo_code --dry-run",
    "migrate run.sh --output own.yaml",
    "verify rows.jsonl",
)
for words in commands:
    sys.argv = ["async-rl", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(words, "ends with", end.code)
"""
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def instructions(recipe: Path) -> list[tuple[str, str]]:
    lines = [line for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def copied(recipe: Path) -> list[tuple[list[str], str]]:
    """The sources and the target of each COPY."""
    words = [rest.split()[1:] for name, rest in instructions(recipe) if name == "COPY"]
    return [(sources, target) for *sources, target in words]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build `build_sdist` or `build_wheel` of a source tree; return the file."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files; the wheel was built from the source distribution."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in (name for names, _ in copied(RECIPES[0]) for name in names):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=ignored)
        else:
            (folder / "checkout").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    sdist = build("build_sdist", folder / "checkout", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build("build_wheel", unpacked, folder)
    target = folder / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    return target


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
    places = {p: p if p.parts[0] == "async_rl" else Path("async_rl", p) for p in expected}
    assert [path for path, place in places.items() if not (installed / place).is_file()] == []


def test_the_installed_command_plans_reads_a_foreign_script_and_judges_programs(
    installed: Path, tmp_path: Path
) -> None:
    script = "N=3\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$((N * 2))\n"
    (tmp_path / "run.sh").write_text(script)
    row = {"prompt": "add", "test_list": ["assert f(1, 2) == 3"]}
    programs = [f"def f(a, b):\n    return a {operator} b" for operator in "+-"]
    rows = [json.dumps(row | {"completion": program}) + "\n" for program in programs]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    command = [sys.executable, "-c", PROGRAM, str(installed)]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    plan, ended, rest = done.stdout.partition("--dry-run ends with 0")
    assert "learner-0" in plan
    assert ended, done.stderr
    assert "actor_rollout_ref.rollout.n=6" in rest
    verdicts = [line.split()[0] for line in rest.splitlines() if line.split()]
    assert "pass" in verdicts
    assert "wrong_answer" in verdicts


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
    # The wheel is made from these files.
    for source in (source for sources, _ in copied(recipe) for source in sources):
        assert (ROOT / source).exists(), source
        if (ROOT / source).is_file():
            shutil.copy(ROOT / source, tmp_path / source)
    make = ["make", "--dry-run", "env", "PYTHON=python3"]
    planned = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
