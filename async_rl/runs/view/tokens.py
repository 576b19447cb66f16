"""The response tokens of a sample with the values that a page colours them by. Pure."""

import bisect
import math
from typing import NamedTuple

import numpy as np

from async_rl.runs.samples import Sample, pieces

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


def tokens_of(sample: Sample) -> list[Token]:
    """Return the response tokens of a sample."""
    trajectory = sample.trajectory
    columns = (
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.behavior_logprobs,
        trajectory.versions,
    )
    values = [column[trajectory.prompt_length :].tolist() for column in columns]
    rows = zip(pieces(sample), *values, _token_advantages(sample), strict=True)
    return [Token(*row) for row in rows]


def _token_advantages(sample: Sample) -> list[float]:
    """Return the advantage of each response token of the sample, in units of the group's root mean
    square; without stored advantages from the sample's reward.
    """
    every = sample.rollout.advantages
    own = sample.advantages
    if every is None or own is None:
        rewards = [each.score.reward for each in sample.rollout.group.trajectories]
        # Equal rewards have no spread.
        spread = float(np.std(rewards)) or 1.0
        advantage = (sample.score.reward - float(np.mean(rewards))) / spread
        return [advantage] * sample.trajectory.response_length
    # Equal advantages of 0 have no scale.
    scale = float(np.sqrt(np.mean(every**2))) or 1.0
    values: list[float] = (own / scale).tolist()
    return values
