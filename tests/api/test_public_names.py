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


def test_the_import_loads_no_other_package_and_a_launch_nothing_heavy() -> None:
    assert loaded_by("import async_rl", *HEAVY) == "[]"
    heavy = ("torch", "vllm", "transformers", "ray", "async_rl.launchers.cli")
    uses = "async_rl.launch, async_rl.open_run, async_rl.Verifier"
    assert loaded_by(f"import async_rl; {uses}", *heavy) == "[]"


def test_a_public_name_exists_and_is_documented() -> None:
    page = DOCUMENT.read_text()
    for name in async_rl.__all__:
        assert name in dir(async_rl)
        assert getattr(async_rl, name).__doc__, name
        assert f"`{name}" in page or f".{name}" in page, name
    with pytest.raises(AttributeError, match="module 'async_rl' has no attribute 'lunch'"):
        async_rl.lunch  # noqa: B018
