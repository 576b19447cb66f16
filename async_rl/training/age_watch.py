"""Watches how many sequences of a batch count, and warns before old data or a quantized engine
harms a run.

The weights of whole sequences become uneven before a policy collapses on old data, so the warning
comes while the learning rate is lowered (`algorithm.step_scale`), or could still be.
Invariant: one warning when the mean share falls below the bound, one message when it is above the
bound again.
"""

import collections
import logging
import statistics
from collections.abc import Mapping

# The mean share over this many steps was below it in 36 of 38 cells that collapsed and in 37 of 201
# others: benchmarks/results/staleness.jsonl of commit 12c28eee.
_FEW = 0.35
_NUM_STEPS = 10
_TRAINING = "training"
_OLD = (
    "the policy has moved far since they were sampled, and may collapse on them; lower"
    " buffer.max_staleness_versions or the learning rate, or set"
    " algorithm.step_scale=effective_sequences"
)
_QUANTIZED = (
    "generation.vllm.extra={} changes the engine's log-probs by {:.2g} nats of the learner's own"
    " weights, and the policy may collapse; remove it, or set"
    " algorithm.step_scale=effective_sequences and a correction, algorithm.policy_loss.correction"
    "=token_tis"
)
PROBE_MEAN = "weights/probe_abs_mean"


class AgeWatch:
    """The state of one learner's warnings."""

    def __init__(self, log: logging.Logger, *, quantization: str = "") -> None:
        """quantization: the settings that quantize the engine (GenerationConfig)."""
        self._log = log
        self._quantization = quantization
        self._shares = collections.deque[float](maxlen=_NUM_STEPS)
        self.stage = _TRAINING

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
        was_low = self.stage != _TRAINING
        self.stage = _TRAINING
        if share < _FEW:
            # The probe where no sample is of the learner's version.
            engine = scalars.get("mismatch/engine_abs_mean", scalars.get(PROBE_MEAN, 0.0))
            whole = scalars.get("mismatch/stale_abs_mean", engine)
            kind = "old data"
            cause = _OLD
            if self._quantization and 2 * engine > whole:
                kind = "quantized engine"
                cause = _QUANTIZED.format(self._quantization, engine)
            self.stage += f": {kind}, {share:.0%} of the sequences count, step x {scale:.2f}"
            if was_low:
                return
            self._log.warning(
                "step %d: its batch is worth %.1f%% of its sequences, below %.0f%%: %s; the step"
                " was multiplied by %.2f",
                step,
                100 * share,
                100 * _FEW,
                cause,
                scale,
            )
        elif was_low:
            self._log.info("step %d: %.0f%% of its sequences count again", step, 100 * share)
