"""The number of generators that a run needs, from two shares of time.

With n generators that are held back a share h of the time, and a learner that waits a share w,
n * (1 - h) * g groups are generated per second and (1 - w) * c are trained. In the long run both
are equal, so a learner that never waits trains c = g * n * (1 - h) / (1 - w) groups per second, and
n * (1 - h) / (1 - w) generators make as many and are never held back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_rl.core.frozen import frozen

# The largest growth in one decision. A learner that waits nearly all the time says little about the
# balance, so it is measured again after doubling.
_MOST_GROWTH = 2

# The least gain of added generators, as a share of what generators with their own cores or GPUs
# would add. Below it they compete for the same cores and are removed.
_LEAST_GAIN = 0.25

# The share of time that learner or generators may wait. A tenth of a window of 30 s is 3 s: one
# long response or one save must not change the number.
TOLERANCE = 0.1

# A smaller number suffices if it is nearly as fast as the balance: when growing at 95 %, when
# shrinking at 98 %. With one limit, a rate at the limit would go to and fro between two numbers.
_GROWS_TO = 0.95
_SHRINKS_TO = 0.98


@frozen
class Decision:
    """The number of generators from now on, and the reason."""

    wanted: int
    reason: str


@frozen
class Window:
    """The measurements of a window of time. learner_waits, held_back: shares of time, 0 to 1, of
    the learner and of the generators. tokens_per_s: of all generators. others: training generators
    of other pools, whose number is fixed; each counts as productive as a generator of this pool.
    """

    learner_waits: float
    held_back: float
    tokens_per_s: float
    others: int = 0

    @property
    def is_starved(self) -> bool:
        """Return whether the learner waits, and longer than the generators. If both wait, for
        example for scores, another number of generators does not help.
        """
        return self.learner_waits > max(TOLERANCE, self.held_back)

    @property
    def is_crowded(self) -> bool:
        """Return whether the generators are held back, and longer than the learner waits."""
        return self.held_back > max(TOLERANCE, self.learner_waits)


@frozen
class _Trial:
    """The state before generators were added: their number, and tokens per second of all."""

    count: int
    tokens_per_s: float


class Steering:
    """Decisions over successive windows.

    Generators that were added and did not help are removed, and no more are added until the run is
    resumed.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        # Empty in a run whose number of generators is not decided here.
        self._most = max(bounds, default=0)
        self._trial: _Trial | None = None

    def decide(self, count: int, window: Window) -> Decision:
        """Decide the number of generators after a window with `count` of them."""
        least, most = self._bounds
        trial = self._trial
        self._trial = None
        if not least <= count <= most:
            reason = f"generators.autoscale allows {least} to {most}"
            return Decision(wanted=min(max(count, least), most), reason=reason)
        # Compared only while the learner still waits: generators that are held back write no faster
        # however many cores they have.
        if trial is not None and count > trial.count and window.is_starved:
            refuted = self._refuted(trial, count, window)
            if refuted is not None:
                return refuted
        present = count + window.others
        waits = window.learner_waits
        held_back = window.held_back
        # A learner that waits all the time has no finite balance: 1,000 times as many at most.
        balance = present * min((1.0 - held_back) / max(1.0 - waits, 1e-9), 1000.0)
        reason = (
            f"the learner waits {waits:.0%} of the time, generators are held back {held_back:.0%}:"
            f" {balance:.1f} generators would balance"
        )
        wanted = count
        if window.is_starved or window.is_crowded:
            enough = (_GROWS_TO if balance > present else _SHRINKS_TO) * balance
            wanted = max(math.ceil(enough) - window.others, least)
        wanted = min(wanted, _MOST_GROWTH * count, max(count, self._most))
        if wanted > count:
            self._trial = _Trial(count=count, tokens_per_s=window.tokens_per_s)
        return Decision(wanted=wanted, reason=reason)

    def _refuted(self, trial: _Trial, count: int, window: Window) -> Decision | None:
        """Return the number before the trial if the added generators did not help."""
        before = trial.count + window.others
        # As a share of all generators, because the tokens are those of all generators.
        growth = (count - trial.count) / before
        if window.tokens_per_s >= trial.tokens_per_s * (1.0 + _LEAST_GAIN * growth):
            return None
        self._most = trial.count
        reason = (
            f"{before} wrote {trial.tokens_per_s:.0f} tokens/s, {count + window.others} write"
            f" {window.tokens_per_s:.0f}: they use the same cores or GPUs, so autoscaling adds no"
            " more until the run is resumed"
        )
        return Decision(wanted=trial.count, reason=reason)
