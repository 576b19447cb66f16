"""Batches with a non-finite loss or gradient, as files for inspection."""

from __future__ import annotations

from pathlib import Path

from async_rl.batching.batch import BatchPart
from async_rl.core.codec import encode
from async_rl.core.types import Trajectory


def write_failed(directory: Path, part: BatchPart, version: int) -> Path:
    """Write the rank's part of the batch of this version, and return the path of rank 0.

    `async_rl.core.codec.decode(path.read_bytes(), dict[int, list[Trajectory]])` reads it: the
    sequences by the id of their group.
    """
    sequences: dict[int, list[Trajectory]] = {}
    for (group_id, _), trajectory in zip(part.own_ids, part.trajectories, strict=True):
        sequences.setdefault(group_id, []).append(trajectory)
    first, mine = (
        directory / f"step_{version + 1:06d}.rank_{rank}.msgpack" for rank in (0, part.number)
    )
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_bytes(encode(sequences))
    return first
