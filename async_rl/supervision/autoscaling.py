"""The decisions of the autoscaler: by a forecast of the run from its recorded times, or by the
shares of time of its members where there is no forecast.

takes: a function that forecasts; pools and members of a window
returns: the number of generators from now on, and the reason
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from async_rl.config.pools import GENERATORS
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.monitoring.bottleneck import share, total_rate
from async_rl.planning.scaling import Decision, Steering, candidates
from async_rl.protocol.membership import Member, PoolCount

_REST = 20  # a forecast takes at most a twentieth of one core

Forecast = Callable[[Sequence[int]], Mapping[int, float]]
"""Steps per second by the number of training generators, the first of which is the present one.
Raises ConfigError or InfrastructureError with the reason why there is no forecast.
"""


class Autoscaler:
    """The decisions of one run."""

    def __init__(self, config: RunConfig, forecast: Forecast, log: logging.Logger) -> None:
        self._bounds = config.generators.autoscale
        self._pool = GENERATORS
        self._forecast = forecast
        self._log = log
        self._steering = Steering(self._bounds)
        self._rates: dict[int, float] = {}
        self._rests_until_s = 0.0
        self._no_forecast = ""

    async def decide(
        self, pools: Mapping[str, PoolCount], members: Sequence[Member], before: Sequence[Member]
    ) -> Decision | None:
        """Return a decision from the window between two lists of members; None while it has no
        shares of time. pools: those that train.
        """
        least, most = self._bounds
        count = pools[self._pool].wanted
        others = sum(pool.wanted for pool in pools.values()) - count
        waits = share(members, before, "learner", "wait_s") if before else None
        blocked = share(members, before, "generator", "blocked_s") if before else None
        # A count outside the configured bounds is corrected without measurements.
        is_outside = not least <= count <= most
        if not is_outside and (waits is None or blocked is None):
            return None
        if before:
            await self._update_rates(count, others)
        return self._steering.decide(
            count,
            others=others,
            learner_waits=waits or 0.0,
            held_back=blocked or 0.0,
            rate=total_rate(members, before, "generator", "tokens_generated"),
            rates=self._rates,
        )

    async def _update_rates(self, count: int, others: int) -> None:
        """Forecast the rates of numbers near the present one, by number in the pool."""
        began_s = time.monotonic()
        if began_s < self._rests_until_s:
            return
        numbers = [number + others for number in candidates(count, self._bounds)]
        reason, self._rates = "", {}
        try:
            # In a thread: a large run takes seconds, and members wait for answers meanwhile.
            rates = await asyncio.to_thread(self._forecast, numbers)
            self._rates = {number - others: rate for number, rate in rates.items()}
        except (ConfigError, InfrastructureError) as error:
            reason = str(error)
        # The reason of a young run contains its number of steps, so the text changes every time.
        if reason and not self._no_forecast:
            self._log.info("no forecast: %s; autoscaling uses the shares of time", reason)
        self._no_forecast = reason
        self._rests_until_s = time.monotonic() + _REST * (time.monotonic() - began_s)
