"""The check of trajectories that another process sent: everything that core/types.py promises about
them.

The codec checks the types of fields only: an array may have any allowed dtype and shape there. What
passes here can be summarized, stored and trained without a further check.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from async_rl.core.errors import ProtocolError
from async_rl.core.types import NO_VERSION, IntArray, Score, Trajectory

_LOGPROB_ROUNDING = 1e-3
"""A log-softmax in bfloat16 may exceed 0 by rounding."""
_LARGEST_SCORE = 1e30
"""The learner computes in float32, and sums over a batch must not overflow there."""
_ARRAYS = (
    ("token_ids", np.dtype(np.int32)),
    ("loss_mask", np.dtype(np.bool_)),
    ("behavior_logprobs", np.dtype(np.float32)),
    ("versions", np.dtype(np.int32)),
)


def check_trajectory(
    sample: Trajectory, prompt: IntArray, *, newest_version: int, vocabulary_size: int
) -> None:
    """Raise ProtocolError unless the sample answers `prompt` and keeps the promises of its type.

    newest_version: the newest one that any generator can have.  vocabulary_size: of the model,
    whose embedding has no row for a larger token id.
    """
    for problem in _problems(sample, prompt, newest_version, vocabulary_size):
        raise ProtocolError(problem)


def is_score(value: float) -> bool:
    """Return whether the value can be a reward or a part of one."""
    return abs(value) <= _LARGEST_SCORE  # false for NaN


def _problems(
    sample: Trajectory, prompt: IntArray, newest_version: int, vocabulary_size: int
) -> Iterator[str]:
    """The broken promises. Checks that later checks rely on come first."""
    length = np.size(sample.token_ids)
    # First the shapes, because the comparisons below would raise on arrays of other lengths.
    for name, dtype in _ARRAYS:
        array: npt.NDArray[np.generic] = getattr(sample, name)
        if array.dtype != dtype or array.shape != (length,):
            yield f"{name} is {array.dtype} {list(array.shape)} instead of {dtype} [{length}]"
    start = len(prompt)
    if sample.prompt_length != start or not np.array_equal(sample.token_ids[:start], prompt):
        yield f"its first {sample.prompt_length} tokens are not the {start} of the prompt"
    if sample.token_ids.min() < 0:
        yield f"token id {sample.token_ids.min()} is below 0"
    if sample.token_ids.max() >= vocabulary_size:
        yield f"token id {sample.token_ids.max()} is not below {vocabulary_size}, the vocabulary"
    # A first segment may start right after the prompt, and each has a token.
    bounds = (start - 1, *sample.starts, length)
    if any(first >= then for first, then in itertools.pairwise(bounds)):
        yield f"segments start at {sample.starts} of {start} to {length}"
    if sample.loss_mask[list(sample.starts)].any():
        yield "the first token of a segment is marked as trained, but nothing predicts it"
    versions = sample.versions
    logprobs = sample.behavior_logprobs
    is_sampled = versions != NO_VERSION
    if is_sampled[:start].any() or sample.loss_mask[:start].any():
        yield "a token of the prompt is marked as written or trained"
    if (sample.loss_mask & ~is_sampled).any():
        yield "a trained token has no version"
    if versions.min() < NO_VERSION or versions.max() > newest_version:
        yield (
            f"versions are {versions.min()} to {versions.max()}, but the known versions are 0 to"
            f" {newest_version}"
        )
    # A comparison with NaN is false.
    if not (logprobs <= _LOGPROB_ROUNDING).all() or np.isinf(logprobs).any():
        yield f"a log-prob is not finite or above 0; the largest is {logprobs.max()}"
    yield from _score_problems(sample.score, sample.response_length)


def _score_problems(score: Score, num_tokens: int) -> Iterator[str]:
    if not is_score(score.reward):
        yield f"reward {score.reward} is not a finite number of at most {_LARGEST_SCORE:g}"
    for name, value in score.parts.items():
        if not is_score(value):
            yield f"part {name!r} of the reward is {value}"
    if not 0 <= score.latency_s < math.inf:
        yield f"the scoring took {score.latency_s} s"
    ends = [0, *(step.end_tokens for step in score.steps), num_tokens]
    if ends != sorted(ends):
        yield f"scored steps end after {ends[1:-1]} of {num_tokens} tokens"
    for step in score.steps:
        if not is_score(step.reward):
            yield f"a scored step has reward {step.reward}"
