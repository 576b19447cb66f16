"""The check of groups that another process sent: everything that core/types.py promises about their
trajectories.

The codec checks the types of fields only. What passes here can be summarized, stored and trained
without a further check.
"""

import itertools
import math

import numpy as np

from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup, PackedSample
from async_rl.core.types import NO_VERSION, IntArray

_LOGPROB_ROUNDING = 1e-3
"""A log-softmax in bfloat16 may exceed 0 by rounding."""
_LARGEST_SCORE = 1e30
"""The learner computes in float32, and sums over a batch must not overflow there."""
_TOKEN_BYTES = 4
_CLOCK = (0, 3)
"""Numbers in a clock: none, or the moments of first token, last token and score."""


def check_group(
    group: PackedGroup, prompt: IntArray, *, newest_version: int, vocabulary_size: int
) -> None:
    """Raise ProtocolError unless the samples answer `prompt` and keep the promises of their type.

    newest_version: the newest one that any generator can have.  vocabulary_size: of the model,
    whose embedding has no row for a larger token id.
    """
    issued = prompt.tobytes()
    if group.prompt[: len(issued)] != issued or len(group.prompt) % _TOKEN_BYTES:
        raise ProtocolError(
            f"its prompt of {group.prompt_length} tokens does not begin with the {len(prompt)} that"
            " were issued"
        )
    if not 0 <= group.generation_s < math.inf:
        raise ProtocolError(f"its generation took {group.generation_s} s")
    length = group.prompt_length
    branches = {tuple(b for b in sample.branches if b[0] < length) for sample in group.members}
    if len(branches) > 1:
        raise ProtocolError("its samples have different branches in their prompt")
    for number, sample in enumerate(group.members):
        try:
            _check_runs(sample, newest_version)
            _check_score(sample)
            if sample.branches:
                _check_branches(sample, len(prompt), group.prompt_length)
            if sample.calls:
                _check_calls(sample)
            if len(sample.clock) not in _CLOCK:
                raise ProtocolError(f"its clock has {len(sample.clock)} moments")
        except ProtocolError as error:
            raise ProtocolError(f"sample {number}: {error}") from error
    sizes = len(group.token_ids), len(group.behavior_logprobs)
    num_tokens = sum([sample.response_length for sample in group.members])
    num_written = sum([sample.num_written for sample in group.members])
    expected = _TOKEN_BYTES * num_tokens, _TOKEN_BYTES * num_written
    if sizes != expected:
        raise ProtocolError(f"its tokens and log-probs have {sizes} bytes instead of {expected}")
    _check_tokens(group, vocabulary_size)


def is_score(value: float) -> bool:
    """Return whether the value can be a reward or a part of one."""
    return abs(value) <= _LARGEST_SCORE  # false for NaN


def _check_tokens(group: PackedGroup, vocabulary_size: int) -> None:
    # One array for all samples: the time of the checks limits the groups per second.
    # Unsigned, so that one comparison finds negative ids too.
    arrays = [np.frombuffer(ids, "<u4") for ids in (group.prompt, group.token_ids)]
    largest = max(ids.max(initial=0) for ids in arrays)
    if largest >= vocabulary_size:
        raise ProtocolError(
            f"token id {largest.astype(np.int32)} is not one of 0 to {vocabulary_size - 1}"
        )
    logprobs = np.frombuffer(group.behavior_logprobs, "<f4")
    # Both are NaN if one of the values is, and a comparison with NaN is false.
    if not (logprobs.max(initial=0) <= _LOGPROB_ROUNDING and logprobs.min(initial=0) > -math.inf):
        largest = logprobs.max(initial=0)
        raise ProtocolError(f"a log-prob is not finite or above 0; the largest is {largest}")


def _check_runs(sample: PackedSample, newest_version: int) -> None:
    num_tokens = 0
    for length, version, is_trained in sample.runs:
        num_tokens += length
        if length < 1:
            raise ProtocolError(f"a run has {length} tokens")
        if not NO_VERSION <= version <= newest_version:
            raise ProtocolError(
                f"version {version} is not one of 0 to {newest_version}, the known ones"
            )
        if is_trained and version == NO_VERSION:
            raise ProtocolError("a trained token has no version")
    if num_tokens != sample.response_length:
        raise ProtocolError(
            f"its runs have {num_tokens} tokens, its response {sample.response_length}"
        )


def _check_branches(sample: PackedSample, num_issued: int, num_prompt: int) -> None:
    end = num_prompt + sample.response_length
    starts = [start for start, _ in sample.branches]
    # A start just after the issued prompt: the tokens need not continue it. Each has a token.
    is_ordered = _ascends(num_issued - 1, *starts, end)
    if not is_ordered or any(not -1 <= parent < start for start, parent in sample.branches):
        raise ProtocolError(f"branches start at {sample.branches} of {num_issued} to {end}")
    lengths, _, is_trained = zip(*sample.runs, strict=True)
    # Tokens of the prompt are not trained.
    roots = [start - num_prompt for start, parent in sample.branches if parent < 0]
    roots = [root for root in roots if root >= 0]
    if np.repeat(is_trained, lengths)[roots].any():
        raise ProtocolError("a token that follows nothing is marked as trained")


def _check_calls(sample: PackedSample) -> None:
    ends = sorted(call.end_tokens for call in sample.calls if call.end_tokens)
    if not _ascends(0, *ends, sample.response_length + 1):
        raise ProtocolError(f"its calls end after {ends} of {sample.response_length} tokens")


def _ascends(*numbers: int) -> bool:
    return all(first < then for first, then in itertools.pairwise(numbers))


def _check_score(sample: PackedSample) -> None:
    score = sample.score
    values = [score.reward, *score.parts.values()]
    values += [step.reward for step in score.steps]
    values += [call.reward for call in sample.calls]
    if not all(map(is_score, values)):
        raise ProtocolError(
            f"one of the rewards {values} is not a finite number of at most {_LARGEST_SCORE:g}"
        )
    if not 0 <= score.latency_s < math.inf:
        raise ProtocolError(f"the scoring took {score.latency_s} s")
    ends = [0, *(step.end_tokens for step in score.steps), sample.response_length]
    if ends != sorted(ends):
        raise ProtocolError(f"scored steps end after {ends[1:-1]} of {ends[-1]} tokens")
