"""The files that a trajectory passes from its prompt to the gradient."""

from __future__ import annotations

import collections
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SIZE = ROOT / "tests" / "repo" / "size.toml"
PACKAGES = (
    *("buffer", "data", "rollouts", "generation", "rewards", "sessions", "batching", "algorithms"),
    *("learner", "training", "protocol", "wire", "runtime", "processes"),
)
"""Of async_rl/, with sandbox/. Weights, supervision and monitoring accompany a step, but no
trajectory passes them.
"""
NUM_STEPS = 4
MIN_CALLS = 2
"""A function of the walk is called in every step; one call may be a timer's."""


def test_a_trajectory_passes_few_files(
    launch: Callable[..., LiveRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = tmp_path / "walk"
    walk.mkdir()
    monkeypatch.setenv("WALK", str(walk))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "walk"))
    run = launch("conf=ppo_code", "num_steps=1000", "evaluation.every_steps=0")
    run.until(lambda: run.step >= 1, "step 1")
    (walk / "on").touch()
    run.until(lambda: run.step >= 1 + NUM_STEPS, f"step {1 + NUM_STEPS}")
    calls: collections.Counter[str] = collections.Counter()
    for report in walk.glob("*.json"):
        calls.update(json.loads(report.read_text()))
    passed = sorted(name for path, n in calls.items() if n >= MIN_CALLS and (name := of_walk(path)))
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
