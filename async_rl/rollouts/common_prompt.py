"""The prompt of a group of agents: what all of them read first, mostly the agent's own prompt.

The ticket's prompt alone is often no part of it. A group has its prompt once, in messages, in the
store and in the learner's rows.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from async_rl.core.types import NO_VERSION, Trajectory


def with_common_prompt(samples: Sequence[Trajectory]) -> list[Trajectory]:
    """Let the tokens that all samples of a group read first be a part of their prompt."""
    start = samples[0].prompt_length
    ends = []
    for sample in samples:
        is_sampled = sample.versions[start:] != NO_VERSION
        ends.append(start + int(is_sampled.argmax()))
        ends.extend(first for first, _ in sample.branches if first > start)
    rows = np.stack([sample.token_ids[start : min(ends)] for sample in samples])
    size = int((rows == rows[0]).all(0).cumprod().sum())
    if not size or len({dict(sample.branches).get(start) for sample in samples}) > 1:
        return list(samples)
    return [_with_prompt(sample, start + size) for sample in samples]


def _with_prompt(sample: Trajectory, length: int) -> Trajectory:
    moved = length - sample.prompt_length
    # Steps and calls count the tokens of the response; a trained call ends after the prompt.
    steps = [replace(s, end_tokens=max(0, s.end_tokens - moved)) for s in sample.score.steps]
    score = replace(sample.score, steps=tuple(steps))
    calls = [replace(c, end_tokens=max(0, c.end_tokens - moved)) for c in sample.calls]
    return replace(sample, prompt_length=length, score=score, calls=tuple(calls))
