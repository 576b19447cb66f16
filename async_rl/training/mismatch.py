"""Watches how far the generators' samples are from the policy that is trained: a probe compares the
log-probs of learner and generators on fixed tokens, and a warning says how many sequences count.

A probe is due at the first load of each life of a generator, of all generators every
weights.probe_every_pushes, and on one row at every push in between. A difference means that a
generator does not compute the policy, so the run stops. Two probes of one life also show whether
its log-probs changed as the learner's did in between, which detects old weights where both versions
are within the tolerance.
Invariant: one warning when the mean share of the sequences that count falls below a bound, one
message when it is above the bound again.
"""

import collections
import logging
import math
import statistics
from collections.abc import Mapping

import numpy as np

from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, IntArray
from async_rl.protocol.generator import Logprobs, Probe
from async_rl.protocol.weights import Manifest
from async_rl.training.checkpoints import Probed
from async_rl.training.operations import Score
from async_rl.training.ranks import TrainingPool
from async_rl.weights.media import Caller
from async_rl.weights.membership import Life

# 64 tokens, because the learner scores them at every push: one short forward pass.
_ROWS = 4
_ROW_TOKENS = 16
_MEAN = "weights/probe_abs_mean"
_WORST = "weights/probe_abs_max"
_CAUSES = (
    "likely causes: different dtypes (model.dtype), an argument of generation.vllm.extra, a model"
    " that the engine implements differently, a head or an adapter that the push does not refresh,"
    " or rounding errors that are larger than usual"
)
# Nats. In float32 both differ by 2e-5. In bfloat16 a correct engine differs at the probe's random
# tokens, which a pretrained model finds improbable, by 0.1 on average and 0.7 at one of 64
# (SmolLM2-135M), as transformers' bfloat16 does from its float32. So the mean decides there.
_EXACT = 1e-3
_ROUNDED = 0.3
"""In bfloat16, or with quantized weights or keys and values."""

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


@frozen
class Expected:
    """The learner's log-probs of the probe rows; an empty list disables the probe. is_due: probe
    all generators, not only new ones.
    """

    version: int
    is_due: bool
    rows: list[IntArray]
    logprobs: list[FloatArray]


class Prober:
    """Decides when a probe is due and compares the answers."""

    def __init__(self, config: RunConfig) -> None:
        self._every = config.weights.probe_every_pushes
        dtype = config.model.dtype
        quantization = config.generation.quantization
        self._kind = f"model.dtype={dtype} {quantization}".rstrip()
        self._is_rounded = dtype != "float32" or bool(quantization)
        self._push_s = config.timeouts.push_s
        self._num_pushes = 0
        self._last: dict[Life, tuple[FloatArray, FloatArray]] = {}
        self.expected: Expected  # of the newest version; every push follows it
        self.metrics: dict[str, float] = {}

    async def expect(self, pool: TrainingPool, manifest: Manifest) -> None:
        """Compute the log-probs to expect of this version.

        Of every version: a generator may join until the next one, when the weights have changed.
        """
        is_due = self._every > 0 and self._num_pushes % self._every == 0
        self._num_pushes += 1
        vocabulary = next(int(t.shape[0]) for t in manifest.tensors if "embed" in t.name)
        rows = probe_rows(vocabulary)
        self.expected = Expected(
            version=manifest.version,
            is_due=is_due,
            rows=rows,
            logprobs=await pool.lead(Score(rows=rows)),
        )

    async def probe(self, caller: Caller, life: Life, expected: Expected) -> Probed | None:
        """Compare the generator's log-probs; None if no probe is due, or if it has another version
        by now.
        """
        is_known = life in self._last and not expected.is_due
        if not expected.logprobs or (is_known and self._every == 0):
            return None
        # One row shows old weights; all four take an engine on a CPU 0.1 s of a core.
        request = Probe(rows=expected.rows[:1] if is_known else expected.rows)
        # The push that this belongs to has its own deadline; this one only bounds the call.
        answer: Logprobs = await caller.call(request, timeout_s=2 * self._push_s)
        if answer.version != expected.version:
            return None
        actual = np.concatenate(answer.rows)
        own = np.concatenate(expected.logprobs)[: len(actual)]
        difference = np.abs(actual - own)
        last = self._last.get(life)
        self._last[life] = actual, own
        followed, error = (None, None) if last is None else followed_share(last, (actual, own))
        # numpy's max and mean return NaN if there is one; Python's max may skip it.
        worst = float(difference.max())
        mean = float(difference.mean())
        self.metrics[_WORST] = max(worst, self.metrics.get(_WORST, 0.0))
        self.metrics[_MEAN] = max(mean, self.metrics.get(_MEAN, 0.0))
        judged, kind = (mean, "mean") if self._is_rounded else (worst, "worst")
        problem = ""
        tolerance = _ROUNDED if self._is_rounded else _EXACT
        if not judged <= tolerance:
            problem = (
                f"{life[0]} and the learner disagree by {judged:.3g} nats ({kind} token of the"
                f" probe) on version {answer.version}, with {self._kind} at most {tolerance:g};"
                f" {_CAUSES}"
            )
        return Probed(
            version=answer.version,
            worst=worst,
            mean=mean,
            followed=followed,
            error=error,
            problem=problem,
        )


def followed_share(
    last: tuple[FloatArray, FloatArray], now: tuple[FloatArray, FloatArray]
) -> tuple[float | None, float | None]:
    """Return the share of the learner's change that the generator's log-probs show, and its
    standard error.

    last, now: log-probs of the generator and of the learner, float32 [16 or 64] each; the tokens
    that both have are compared. The share is the least-squares slope of the generator's change by
    the learner's, so a constant difference of the two cancels: 1 if it computes with the new
    weights, 0 with the old ones. (None, None) if the learner's did not change.
    """
    size = min(len(last[0]), len(now[0]))
    change, own = (
        new[:size].astype(np.float64) - old[:size] for new, old in zip(now, last, strict=True)
    )
    norm = float(own @ own)
    if norm == 0:
        return None, None
    slope = float(change @ own) / norm
    residual = float(np.linalg.norm(change - slope * own))
    return slope, residual / math.sqrt(norm * (len(own) - 1))


def probe_rows(vocabulary: int) -> list[IntArray]:
    """Return 4 rows of token ids spread over the vocabulary, the same in every run: int32 [16]
    each.
    """
    # A fixed seed: a difference between two runs is then a difference of their weights.
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocabulary, _ROW_TOKENS, dtype=np.int32) for _ in range(_ROWS)]


class AgeWatch:
    """The state of one learner's warnings of old data and of a quantized engine.

    The weights of whole sequences become uneven before a policy collapses on old data, so the
    warning comes while the learning rate is lowered (`algorithm.step_scale`), or could still be.
    """

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
            engine = scalars.get("mismatch/engine_abs_mean", scalars.get(_MEAN, 0.0))
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
