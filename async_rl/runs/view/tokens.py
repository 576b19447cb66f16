"""The response tokens of a sample with the values that a page colours them by. Pure."""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from async_rl.core.types import FloatArray, Group

_PROBABILITIES = (0.1, 0.5, 0.9)  # a token below the first is a surprise
# In root mean squares of the group's advantages: 13 % of normally distributed values are beyond
# 1.5, and 1e-6 is zero after rounding.
_ADVANTAGES = (-1.5, -0.5, -1e-6, 1e-6, 0.5, 1.5)


class Token(NamedTuple):
    """A response token and its values. text: what it adds to the response. logprob, version: of the
    policy that sampled it. advantage: in root mean squares of its group's advantages.
    """

    text: str
    token_id: int
    is_sampled: bool
    logprob: float
    version: int
    advantage: float

    @property
    def probability(self) -> float:
        """The probability of the token when it was sampled."""
        return math.exp(self.logprob)

    @property
    def probability_grade(self) -> int:
        """The class of its probability, 0 to 3."""
        return bisect.bisect(_PROBABILITIES, self.probability)

    @property
    def advantage_grade(self) -> int:
        """The class of its advantage, 0 to 6; 3 is none."""
        return bisect.bisect(_ADVANTAGES, self.advantage)


def tokens_of(
    group: Group, index: int, pieces: Sequence[str], advantages: FloatArray | None
) -> list[Token]:
    """Return the response tokens of a sample. pieces: the text of each; advantages: float32 of all
    response tokens of the group, if a step stored them.
    """
    sample = group.trajectories[index]
    columns = (sample.token_ids, sample.loss_mask, sample.behavior_logprobs, sample.versions)
    values = [column[sample.prompt_length :].tolist() for column in columns]
    own = _token_advantages(group, index, advantages)
    return [Token(*row) for row in zip(pieces, *values, own, strict=True)]


def _token_advantages(group: Group, index: int, advantages: FloatArray | None) -> list[float]:
    """Return the advantage of each response token of the sample, in units of the group's root mean
    square; without stored advantages from the sample's reward.
    """
    lengths = [sample.response_length for sample in group.trajectories]
    if advantages is None or len(advantages) != sum(lengths):
        rewards = [sample.score.reward for sample in group.trajectories]
        # Equal rewards have no spread.
        spread = float(np.std(rewards)) or 1.0
        return [(rewards[index] - float(np.mean(rewards))) / spread] * lengths[index]
    start = sum(lengths[:index])
    # Equal advantages of 0 have no scale.
    scale = float(np.sqrt(np.mean(advantages**2))) or 1.0
    values: list[float] = (advantages[start : start + lengths[index]] / scale).tolist()
    return values
