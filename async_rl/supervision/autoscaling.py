"""The autoscaler: decides how many generators a run needs, from the shares of time of its members.

takes: the registry
returns: the number of generators from now on, and the reason
"""

from __future__ import annotations

from async_rl.config.pools import GENERATORS, evaluates_only
from async_rl.config.run import RunConfig
from async_rl.monitoring.bottleneck import mean_rates, total_rate
from async_rl.planning.scaling import Decision, Steering, Window
from async_rl.protocol.membership import Member
from async_rl.supervision.registry import Registry


class Autoscaler:
    """The decisions of one run."""

    def __init__(self, config: RunConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._steering = Steering(config.generators.autoscale)
        self._before: list[Member] = []
        self._count_before = 0

    def decide(self) -> Decision | None:
        """Return the decision after the window since the last call; None if nothing is to change,
        or if not all training generators served for the whole window.
        """
        bounds = self._config.generators.autoscale
        pools = [p for p in self._registry.pools() if p.work not in ("", "evaluation")]
        wanted = {pool.pool: pool.wanted for pool in pools}
        count = wanted.pop(GENERATORS)
        members: list[Member] = []
        # A generator that starts or drains works only for a part of the window, so the shares of
        # time would not describe the wanted number.
        if all(pool.live == pool.wanted and not pool.draining for pool in pools):
            # A generator that only evaluates waits by design.
            members = [
                m for m in self._registry.members if not evaluates_only(self._config, m.name)
            ]
        before = self._before if count == self._count_before else []
        self._before = members
        self._count_before = count
        if not members:
            return None
        learner = mean_rates(members, before, "learner") if before else {}
        generators = mean_rates(members, before, "generator") if before else {}
        # A count outside the configured bounds is corrected without measurements.
        is_outside = not bounds[0] <= count <= bounds[1]
        if not is_outside and not (learner and generators):
            return None
        window = Window(
            learner_waits=learner.get("wait_s", 0.0),
            held_back=generators.get("blocked_s", 0.0),
            tokens_per_s=total_rate(members, before, "generator", "tokens_generated"),
            others=sum(wanted.values()),
        )
        decision = self._steering.decide(count, window)
        return decision if decision.wanted != count else None
