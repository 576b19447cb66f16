"""Ready reward terms that read only the form of a response. Pure.

xml_format: 1 for <think>..</think><answer>..</answer>, else 0. length: the share of the allowed
tokens that the policy used; a negative weight makes responses shorter, a positive one longer.
"""

from __future__ import annotations

import re

from async_rl.rewards.verifier.protocol import RewardSample

_FORM = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def is_well_formed(response: str) -> bool:
    """Return whether it is one <think> part, then one <answer> part, and nothing else."""
    # The counts first: with many tags the expression takes quadratic time.
    return all(response.count(tag) == 1 for tag in _TAGS) and _FORM.fullmatch(response) is not None


def xml_format(sample: RewardSample) -> float:
    """1 if the response is well formed, else 0."""
    return float(is_well_formed(sample.response))


def length(sample: RewardSample) -> float:
    """Written tokens divided by the allowed ones, 0 to 1."""
    return min(sum(sample.is_written) / sample.max_tokens, 1.0)
