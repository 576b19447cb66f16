"""The checkpoint directories of a run: which is the newest, which may be deleted.

A checkpoint of version v is `<run>/checkpoints/step_<v>`, complete as soon as it has that
name. learner/checkpoint.py knows their content.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def directory_of(run_dir: Path, version: int) -> Path:
    """Return the directory of the checkpoint of this version."""
    return run_dir / "checkpoints" / f"step_{version:06d}"


def versions(run_dir: Path) -> list[int]:
    """Return the versions of the complete checkpoints, oldest first."""
    names = (
        path.name.removeprefix("step_")
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.is_dir()
    )
    return sorted(int(name) for name in names if name.isdecimal())


def newest(run_dir: Path) -> Path | None:
    """Return the checkpoint that the learner resumes from, or None before the first."""
    saved = versions(run_dir)
    return directory_of(run_dir, saved[-1]) if saved else None


def prune(run_dir: Path, *, keep: int, keep_best: int, scores: Mapping[int, float]) -> int:
    """Delete all but the newest `keep` and, of the others, the `keep_best` of the highest score.

    Returns the oldest of the newest `keep`, the oldest version that the learner may resume from.
    """
    saved = versions(run_dir)
    recent, older = saved[-keep:], saved[:-keep]
    scored = [version for version in older if version in scores]
    best = sorted(scored, key=lambda version: (scores[version], version), reverse=True)[:keep_best]
    for version in set(older) - set(best):
        shutil.rmtree(directory_of(run_dir, version))
    return recent[0]
