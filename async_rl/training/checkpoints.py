"""The checkpoints of a run on disk: which is the newest, which may go. Knows directories only; what
is in them is learner/checkpoint.py's.

A checkpoint of version v is `<run>/checkpoints/step_<v>`, complete as soon as it has that name.
Used by the learner's Saver and by `async-rl resume`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def directory_of(run_dir: Path, version: int) -> Path:
    """Where the checkpoint of this version is, or will be."""
    return run_dir / "checkpoints" / f"step_{version:06d}"


def versions(run_dir: Path) -> list[int]:
    """Versions of the complete checkpoints, oldest first."""
    names = (
        path.name.removeprefix("step_")
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.is_dir()
    )
    return sorted(int(name) for name in names if name.isdecimal())


def newest(run_dir: Path) -> Path | None:
    """The checkpoint that the learner goes on from; None if there is none yet."""
    found = versions(run_dir)
    return directory_of(run_dir, found[-1]) if found else None


def prune(run_dir: Path, *, keep: int, keep_best: int, scores: Mapping[int, float]) -> int:
    """Removes all but the newest `keep` and, of the others, the `keep_best` of the highest score;
    the oldest version to go back to.
    """
    found = versions(run_dir)
    recent, older = found[-keep:], found[:-keep]
    best = sorted((v for v in older if v in scores), key=lambda v: (scores[v], v), reverse=True)[
        :keep_best
    ]
    for version in set(older) - set(best):
        shutil.rmtree(directory_of(run_dir, version))
    return recent[0]
