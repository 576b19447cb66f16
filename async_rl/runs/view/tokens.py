"""The response tokens of a sample with the values that a page colours them by. Pure."""

import bisect
import math
from typing import NamedTuple

from async_rl.runs.samples import Sample, pieces

_PROBABILITIES = (0.1, 0.5, 0.9)  # a token below the first is a surprise


class Token(NamedTuple):
    """A response token and its values. text: what it adds to the response. logprob, version: of the
    policy that sampled it.
    """

    text: str
    token_id: int
    is_sampled: bool
    logprob: float
    version: int

    @property
    def probability(self) -> float:
        """The probability of the token when it was sampled."""
        return math.exp(self.logprob)

    @property
    def probability_grade(self) -> int:
        """The class of its probability, 0 to 3."""
        return bisect.bisect(_PROBABILITIES, self.probability)


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
    rows = zip(pieces(sample), *values, strict=True)
    return [Token(*row) for row in rows]
