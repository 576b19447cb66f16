"""Ready reward terms that look at the form of a response alone. Pure.

xml_format: 1 for <think>..</think><answer>..</answer>, else 0; length: the share of the allowed
tokens that was used, so that a negative weight makes responses shorter and a positive one longer.
Called by scoring.py and, as functions of a configuration, through functions.py.
"""

from __future__ import annotations

import re

from async_rl.rewards.verifier.protocol import RewardSample

_FORM = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def is_well_formed(response: str) -> bool:
    """Whether it is one <think> part followed by one <answer> part and nothing else."""
    return _FORM.fullmatch(response) is not None and all(response.count(tag) == 1 for tag in _TAGS)


def xml_format(sample: RewardSample) -> float:
    """1 if the response is well formed, else 0."""
    return float(is_well_formed(sample.response))


def length(sample: RewardSample) -> float:
    """Written tokens over the allowed ones, 0 to 1."""
    return min(sum(sample.is_written) / sample.max_tokens, 1.0)
