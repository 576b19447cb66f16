"""Watches how many sequences of a batch count, and warns before old data harms a run.

The weights of whole sequences become uneven before a policy collapses on old data, so the warning
comes while the learning rate is lowered (`algorithm.step_scale`), or could still be.
Invariant: one warning when the share falls below the bound, one message when it is above it again.
"""

from __future__ import annotations

import collections
import logging
import statistics
from collections.abc import Mapping

from async_rl.config.policy_losses import EffectiveStepScale, StepScale

# Without a bound of the settings: the mean share over this many steps separates the runs of the
# league that collapsed from the runs that did not (docs/staleness.md).
_FEW = 0.35
_NUM_STEPS = 10


class AgeWatch:
    """The state of one learner's warnings."""

    def __init__(self, settings: StepScale, log: logging.Logger) -> None:
        self._log = log
        self._bound = _FEW
        num_steps = _NUM_STEPS
        # A bound of 1 lowers nearly every step a little, so it must not warn at every step.
        if isinstance(settings, EffectiveStepScale) and settings.bound < 1:
            self._bound = settings.bound
            num_steps = 1
        self._shares = collections.deque[float](maxlen=num_steps)
        self._is_low = False
        self.stage = "training"

    def observe(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the metrics of a step; `stage` is then the learner's activity for `async-rl
        status`.
        """
        share = scalars["policy/effective_sequences"]
        scale = scalars["policy/step_scale"]
        # 0 while only the critic is trained: no batch of a policy has a share of 0.
        if share == 0:
            return
        self._shares.append(share)
        share = statistics.fmean(self._shares)
        was_low = self._is_low
        self._is_low = share < self._bound
        self.stage = "training"
        if self._is_low:
            self.stage = (
                f"training: old data, {share:.0%} of the sequences count, step x {scale:.2f}"
            )
        if self._is_low and not was_low:
            self._log.warning(
                "step %d: its batch is worth %.1f%% of its sequences, below %.0f%%: the policy has"
                " moved far since they were sampled, and may collapse on them; the step was"
                " multiplied by %.2f; lower buffer.max_staleness_versions or the"
                " learning rate, or set algorithm.step_scale=effective_sequences",
                step,
                100 * share,
                100 * self._bound,
                scale,
            )
        if was_low and not self._is_low:
            self._log.info("step %d: %.0f%% of its sequences count again", step, 100 * share)
