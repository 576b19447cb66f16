"""Learning-rate schedules, as functions of the step number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    span: Sequence[float],
    schedule: Literal["constant", "cosine"],
    min_lr_ratio: float,
) -> float:
    """Return the learning rate of step 0, 1, ...

    Linear warm-up from lr / warmup_steps at step 0 to lr at step warmup_steps - 1.  Then either lr
    ("constant"), or a cosine from lr at the first step of `span` to min_lr_ratio * lr at its last,
    which stays there (arXiv 1608.03983 eq. 5, one period).
    """
    # (step + 1): a first step with rate 0 would train nothing.
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    begin, end = span
    passed = min(1.0, max(0.0, (step - begin) / max(1.0, end - begin)))
    cosine = math.cos(math.pi * passed)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + cosine))
