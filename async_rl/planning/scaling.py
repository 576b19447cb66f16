"""The number of generators that balances a run, from a forecast or from how long the learner and
generators wait.

A forecast of the steps per second with several numbers decides by itself: the fewest generators
that are nearly as fast as the fastest. Otherwise the shares of time decide.

With n generators that are held back a share h of the time, and a learner that waits a share w, the
groups generated per second are n * (1 - h) * g and those trained are (1 - w) * c.  In the long run
both are equal, so a learner that never waits trains c = g * n * (1 - h) / (1 - w) groups per
second.  n * (1 - h) / (1 - w) generators make as many and are never held back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from async_rl.core.frozen import frozen

# Another count is chosen only if the balance is this share of a generator beyond the middle of two
# counts. With a balance of 2.5 the run would otherwise alternate between 2 and 3.
_DEAD_BAND = 0.25

# The largest growth in one decision. A learner that waits nearly all the time says little about the
# balance, so it is measured again after doubling.
_MOST_GROWTH = 2.0

# The least gain of added generators, as a share of what generators with their own cores or GPUs
# would add. Below it they compete for the same cores and are removed.
_LEAST_GAIN = 0.25


# The share of time that learner or generators may wait. A tenth of a window of 30 s is 3 s: one
# long response or one save must not change the number.
TOLERANCE = 0.1

# A smaller number suffices if it is nearly as fast as the fastest: when growing at 95 %, when
# shrinking at 98 %. With one limit, a rate at the limit would go to and fro between two numbers.
_GROWS_TO, _SHRINKS_TO = 0.95, 0.98


@frozen
class Decision:
    """The number of generators from now on, and the reason."""

    wanted: int
    reason: str


def balanced(count: int, *, learner_waits: float, held_back: float) -> float:
    """Return the number of generators, not rounded, that keeps both sides busy.

    learner_waits, held_back: shares of time (0 to 1), measured with `count` generators.
    """
    # A learner that waits all the time has no finite balance; it is limited to 1,000 times as many.
    return min(count * (1.0 - held_back) / max(1.0 - learner_waits, 1e-9), count * 1000.0)


def decide(
    count: int, *, learner_waits: float, held_back: float, bounds: Sequence[int], others: int = 0
) -> Decision:
    """Decide the number of generators after a window with `count` of them.

    learner_waits, held_back: shares of time in the window; others: training generators of other
    pools; their number is fixed, and each counts as one generator of this pool.  bounds: fewest and
    most generators.
    """
    least, most = bounds
    if count < least or count > most:
        wanted = min(max(count, least), most)
        reason = f"generators.autoscale allows {least} to {most}"
        return Decision(wanted=wanted, reason=reason)
    balance = balanced(count + others, learner_waits=learner_waits, held_back=held_back)
    reason = (
        f"the learner waits {learner_waits:.0%} of the time, generators are held back"
        f" {held_back:.0%}: {balance:.1f} generators would balance"
    )
    balance -= others
    wanted = count
    # Only the side that waits more is relieved. If both wait (for scores, for example), another
    # number of generators does not help.
    if learner_waits > max(TOLERANCE, held_back):
        target = min(balance, count * _MOST_GROWTH)
        wanted = max(count, math.floor(target + 0.5 - _DEAD_BAND))
    elif held_back > max(TOLERANCE, learner_waits):
        wanted = min(count, math.ceil(balance - 0.5 + _DEAD_BAND))
    return Decision(wanted=min(max(wanted, least), most), reason=reason)


def candidates(count: int, bounds: Sequence[int]) -> list[int]:
    """Return the numbers of generators to forecast, `count` first."""
    least, most = bounds
    numbers = {count // 2, count - 1, count + 1, count + count // 2, 2 * count} - {count}
    return [count, *sorted(n for n in numbers if least <= n <= most)]


def decide_by_forecast(count: int, rates: Mapping[int, float]) -> Decision:
    """Decide from the forecast steps per second by number of generators, `count` among them."""
    best = max(rates.values())

    def fewest(share: float) -> int:
        return min(number for number, rate in rates.items() if rate >= share * best)

    wanted = count
    if fewest(_GROWS_TO) > count:
        wanted = fewest(_GROWS_TO)
    elif fewest(_SHRINKS_TO) < count:
        wanted = fewest(_SHRINKS_TO)
    reason = (
        f"forecast from recorded times: {rates[count] * 3600:.0f} steps/hour with {count},"
        f" {rates[wanted] * 3600:.0f} with {wanted}"
    )
    return Decision(wanted=wanted, reason=reason)


@frozen
class _Trial:
    """The state before generators were added: their number, and tokens per second of all."""

    count: int
    rate: float


class Steering:
    """Decisions over successive windows.

    Generators that were added and did not help are removed, and no more are added until the run is
    resumed.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        # Empty in a run without autoscaling.
        self._most = max(bounds, default=0)
        self._trial: _Trial | None = None

    def decide(
        self,
        count: int,
        *,
        learner_waits: float,
        held_back: float,
        rate: float,
        others: int = 0,
        rates: Mapping[int, float] | None = None,
    ) -> Decision:
        """Decide by the forecast `rates` if they have this count, otherwise as the function
        `decide`. rate: tokens per second of all generators.
        """
        least, most = self._bounds
        trial = self._trial
        decision = decide(
            count,
            learner_waits=learner_waits,
            held_back=held_back,
            bounds=self._bounds,
            others=others,
        )
        if rates and count in rates and least <= count <= most:
            decision = decide_by_forecast(count, rates)
        self._trial = None
        # The rates are compared only while the learner still waits. Generators that are held back
        # write no faster however many cores they have.
        is_starved = learner_waits > max(TOLERANCE, held_back)
        if trial is not None and count > trial.count and is_starved:
            # As a share of all generators, because `rate` is the rate of all of them.
            growth = (count - trial.count) / (trial.count + others)
            if rate < trial.rate * (1.0 + _LEAST_GAIN * growth):
                self._most = trial.count
                reason = (
                    f"{trial.count + others} wrote {trial.rate:.0f} tokens/s, {count + others}"
                    f" write {rate:.0f}: they use the same cores or GPUs, so autoscaling adds no"
                    " more until the run is resumed"
                )
                return Decision(wanted=trial.count, reason=reason)
        if least <= count < decision.wanted:
            self._trial = _Trial(count=count, rate=rate)
        return dataclasses.replace(decision, wanted=min(decision.wanted, max(count, self._most)))
