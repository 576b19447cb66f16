"""One response for the browser: its tokens with the values that can colour them.

Pure: from a stored group and the text of each token to classes and hints that the template writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, Group, Trajectory
from async_rl.monitoring.rollout_page import token_advantages

_PROBABILITIES = (0.1, 0.5, 0.9, 0.99)
"""Bounds of the colours of a probability; a token below the first is a surprise."""
_ADVANTAGES = (-1.5, -0.5, -1e-6, 1e-6, 0.5, 1.5)
"""Bounds of the colours of an advantage, in root mean squares of its group's."""
_NUM_VERSION_COLOURS = 6


@frozen
class Token:
    """The text that a token adds, the class of each of its colours, and a hint with its values."""

    text: str
    classes: str
    hint: str


@frozen
class Response:
    """One sample of a group. verdicts: (result, number of equal neighbours). failure: the message
    of the first test that failed.
    """

    index: int
    tokens: list[Token]
    trajectory: Trajectory
    advantage: float
    verdicts: list[tuple[str, int]]
    failure: str
    versions: tuple[int, int] | None


def response(
    group: Group, index: int, pieces: Sequence[str], advantages: FloatArray | None
) -> Response:
    """Return sample `index` of a group. pieces: the text of each response token; advantages:
    float32 [response tokens of the group], if a step with a critic stored them.
    """
    sample = group.trajectories[index]
    own = token_advantages(group, index, advantages)
    start = sample.prompt_length
    values = zip(
        pieces,
        sample.token_ids[start:].tolist(),
        sample.loss_mask[start:].tolist(),
        sample.behavior_logprobs[start:].tolist(),
        sample.versions[start:].tolist(),
        own,
        strict=True,
    )
    versions = sample.versions[sample.loss_mask]
    return Response(
        index=index,
        tokens=[_token(*value) for value in values],
        trajectory=sample,
        advantage=float(np.mean(own)) if own else 0.0,
        failure=sample.score.failure,
        verdicts=[
            (verdict.value, len(list(same)))
            for verdict, same in itertools.groupby(sample.score.verdicts)
        ],
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
    )


def _token(
    text: str, token_id: int, is_sampled: bool, logprob: float, version: int, advantage: float
) -> Token:
    if not is_sampled:
        return Token(text=text, classes="other", hint=f"token {token_id}, not sampled")
    probability = math.exp(logprob)
    return Token(
        text=text,
        classes=(
            f"p{sum(probability >= bound for bound in _PROBABILITIES)}"
            f" a{sum(advantage >= bound for bound in _ADVANTAGES)}"
            f" v{version % _NUM_VERSION_COLOURS}"
        ),
        hint=(
            f"token {token_id}, probability {probability:.3g}, version {version}, advantage"
            f" {advantage:+.2f}"
        ),
    )
