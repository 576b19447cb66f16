"""Learning-rate schedules, as functions of the step number."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    num_steps: int,
    schedule: Literal["constant", "cosine"],
    min_lr_ratio: float,
) -> float:
    """Return the learning rate of step 0, 1, ...

    Linear warm-up from lr / warmup_steps at step 0 to lr at step warmup_steps - 1.  Then either lr
    ("constant"), or a cosine from lr to min_lr_ratio * lr at num_steps, which stays there
    (arXiv 1608.03983 eq. 5, one period).
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
