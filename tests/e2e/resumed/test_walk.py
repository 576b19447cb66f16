"""The files that a trajectory passes from its prompt to the gradient."""

import tomllib
from pathlib import Path

import pytest
from resumed_run import Resumed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
SIZE = ROOT / "tests" / "repo" / "size.toml"
PACKAGES = (
    *("buffer", "data", "rollouts", "generation", "rewards", "sessions", "batching", "algorithms"),
    *("learner", "training", "protocol", "wire", "runtime", "processes"),
)
"""Of async_rl/, with sandbox/. Weights, supervision and monitoring accompany a step, but no
trajectory passes them.
"""
MIN_CALLS = 2
"""A function of the walk is called in every step; one call may be a timer's."""


def test_a_trajectory_passes_few_files(resumed: Resumed) -> None:
    passed = sorted(
        name for path, n in resumed.calls.items() if n >= MIN_CALLS and (name := of_walk(path))
    )
    limit = tomllib.loads(SIZE.read_text())["walk"]["files"]
    assert len(passed) <= limit, "a trajectory passes more files; docs/decisions/size.md says why"
    for package in ("buffer", "rollouts", "generation", "rewards", "batching", "learner"):
        assert any(f"/{package}/" in name for name in passed), f"nothing was counted in {package}"


def of_walk(path: str) -> str:
    """Return the file's path in the repository if it belongs to the walk, else nothing."""
    if not path.startswith(f"{ROOT}/"):
        return ""
    folder, package, *_ = Path(path).relative_to(ROOT).parts
    is_inside = folder == "sandbox" or (folder == "async_rl" and package in PACKAGES)
    return str(Path(path).relative_to(ROOT)) if is_inside else ""
