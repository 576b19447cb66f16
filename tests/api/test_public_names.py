"""The public names: they exist, they are documented, and importing them costs little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import async_rl

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/python.md"
HEAVY = ("torch", "vllm", "transformers", "ray", "zmq", "hydra", "numpy", "pydantic", "typer")


def loaded_by(code: str, *modules: str) -> str:
    """The given modules that a new interpreter has loaded after this code."""
    check = f"{code}\nimport sys; print(sorted(set({modules!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_no_other_package() -> None:
    assert loaded_by("import async_rl", *HEAVY) == "[]"


def test_a_launch_loads_neither_torch_nor_an_engine() -> None:
    heavy = ("torch", "vllm", "transformers", "ray")
    assert loaded_by("import async_rl; async_rl.launch, async_rl.Verifier", *heavy) == "[]"


@pytest.mark.parametrize("name", async_rl.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    assert name in dir(async_rl)
    assert getattr(async_rl, name).__doc__
    assert f"`{name}" in DOCUMENT.read_text() or f".{name}" in DOCUMENT.read_text()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'async_rl' has no attribute 'lunch'"):
        async_rl.lunch  # noqa: B018


def test_starting_runs_from_python_loads_no_command_line() -> None:
    code = (
        "import sys, async_rl; async_rl.launch; async_rl.open_run\n"
        "loaded = [m for m in sys.modules if m.startswith('async_rl.launchers.c')]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
