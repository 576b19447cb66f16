"""How many generators would balance a run, from the shares of time that the learner waits and the
generators are held back. Pure.

With n generators that are held back a share h of the time, and a learner that waits a share w, the
groups made per second are n * (1 - h) * g and those trained are (1 - w) * c, and in the long run
they are equal.  So one generator makes g and the learner could take c = g * n * (1 - h) / (1 - w):
that many generators, n * (1 - h) / (1 - w), would keep it busy and would never be held back. Used
by the autoscaler (`Steering`) and by the answer of `async-rl status` (`balanced`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from async_rl.config.generation import AutoscaleConfig

_DEAD_BAND = 0.25
"""Of a generator beyond the middle between two counts, before the other is chosen: balance at 2.5
is no reason to go to and fro.
"""
_MOST_GROWTH = 2.0
"""A learner that waits nearly all the time says little on how many it needs; twice as many, and
another look, says more.
"""


_LEAST_GAIN = 0.25
"""Of what generators on cores or GPUs of their own would add: those that add less share what is
scarce.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many generators from now on, and why."""

    wanted: int
    reason: str


def balanced(count: int, *, learner_waits: float, held_back: float) -> float:
    """The number of generators, not rounded, at which neither side would wait; `count` of them gave
    these shares of time (0 to 1).
    """
    return min(count * (1.0 - held_back) / max(1.0 - learner_waits, 1e-9), count * 1000.0)


def decide(
    count: int, *, learner_waits: float, held_back: float, config: AutoscaleConfig, others: int = 0
) -> Decision:
    """What the autoscaler does after a window in which `count` generators gave these shares of
    time; the same count = nothing.

    others: generators that train beside them and whose number stays; each is taken to make as much
    as one of these.
    """
    shares = (
        f"the learner waits {learner_waits:.0%} of the time, generators are held back"
        f" {held_back:.0%}"
    )
    if count < config.min or count > config.max:
        wanted = min(max(count, config.min), config.max)
        return Decision(
            wanted=wanted, reason=f"generators.autoscale allows {config.min} to {config.max}"
        )
    balance = balanced(count + others, learner_waits=learner_waits, held_back=held_back)
    what = f"{shares}: {balance:.1f} generators would balance"
    balance -= others
    wanted = count
    if learner_waits > max(config.tolerance, held_back):
        wanted = max(count, math.floor(min(balance, count * _MOST_GROWTH) + 0.5 - _DEAD_BAND))
    elif held_back > max(config.tolerance, learner_waits):
        wanted = min(count, math.ceil(balance - 0.5 + _DEAD_BAND))
    return Decision(wanted=min(max(wanted, config.min), config.max), reason=what)


class Steering:
    """Decisions from window to window: as `decide`, but those that were added and did not help are
    taken back, and no more are tried.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._most = config.max
        self._tried: tuple[int, float] | None = (
            None  # the count before the last addition, and what it wrote
        )

    def decide(
        self, count: int, *, learner_waits: float, held_back: float, rate: float, others: int = 0
    ) -> Decision:
        """rate: tokens per second that all of them wrote in the window; the rest as in the function
        `decide`.
        """
        decision = decide(
            count,
            learner_waits=learner_waits,
            held_back=held_back,
            config=self._config,
            others=others,
        )
        tried, self._tried = self._tried, None
        if (
            tried is not None
            and count > tried[0]
            and learner_waits > max(self._config.tolerance, held_back)
        ):
            before, rate_before = tried
            if rate < rate_before * (1.0 + _LEAST_GAIN * (count - before) / (before + others)):
                self._most = before
                what = (
                    f"{before + others} wrote {rate_before:.0f} tokens/s, {count + others} write"
                    f" {rate:.0f}: they share what is scarce"
                )
                return Decision(
                    wanted=before, reason=f"{what}, and no more are tried until the run is resumed"
                )
        if self._config.min <= count < decision.wanted:
            self._tried = (count, rate)
        return dataclasses.replace(decision, wanted=min(decision.wanted, max(count, self._most)))
