"""Token rows as a group, so that rows without a history take the same path as training data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.core.types import NO_VERSION, Group, IntArray, Purpose, Score, Trajectory


def rows_as_group(rows: Sequence[IntArray], *, prompt_length: int) -> Group:
    """Return a group whose tokens after prompt_length can be scored and are not trained."""
    return Group(
        group_id=0,
        attempt=1,
        prompt_id="",
        purpose=Purpose.EVAL,
        data_source="",
        generator="",
        admitted_version=NO_VERSION,
        trajectories=[_trajectory(np.asarray(row, dtype=np.int32), prompt_length) for row in rows],
        generation_s=0.0,
    )


def _trajectory(row: IntArray, prompt_length: int) -> Trajectory:
    return Trajectory(
        token_ids=row,
        prompt_length=prompt_length,
        loss_mask=np.zeros(len(row), dtype=np.bool_),
        behavior_logprobs=np.zeros(len(row), dtype=np.float32),
        versions=np.full(len(row), NO_VERSION, dtype=np.int32),
        is_truncated=False,
        score=Score(reward=0.0, parts={}, verdicts=(), latency_s=0.0),
    )
