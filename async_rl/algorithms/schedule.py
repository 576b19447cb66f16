"""Learning-rate schedules. Pure functions of the step number."""

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
    """Learning rate of step 0, 1, ...: linear warm-up to lr, then constant, or a cosine from lr to
    min_lr_ratio * lr at num_steps.

    The first step has lr / warmup_steps, the warmup_steps-th has lr.  After num_steps the cosine
    stays at its floor.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
