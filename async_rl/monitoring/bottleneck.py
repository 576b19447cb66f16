"""The bottleneck of a run as a sentence, with a remedy, from the counters of two moments.

A process is measured against its own time between the two moments; a process that was restarted
between them, against its whole age. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.core.types import Role
from async_rl.monitoring.rates import per_second
from async_rl.observability.activity import GAUGE
from async_rl.protocol.membership import Member

_LEARNER_RELIEF = (
    "more ranks (learner.ranks) on additional cores or GPUs relieve it; more generators do not"
)
_UPSTREAM = {
    "generation": (
        "generators write {:.0%}; more generators (generators.count) on additional cores or GPUs,"
        " or shorter answers, relieve it; more ranks do not"
    ),
    "agents": (
        "sessions wait {:.0%} for their agents; faster agents and tools, or more sessions at a time"
        " (generation.max_concurrent_groups), relieve it; more generators do not"
    ),
    "admission": (
        "generators are held back {:.0%}; a looser bound (buffer.max_staleness_versions) or smaller"
        " steps (buffer.groups_per_step) relieve it"
    ),
    "scoring": (
        "generators wait for verdicts alone for {:.0%}; more cells or verifiers"
        " (verifiers.cells, verifiers.count) on additional cores relieve it; more generators do not"
    ),
}
"""The parts of a run that can let the learner wait: share of time, and remedy."""


def _mean_rates(
    members: Sequence[Member], before: Sequence[Member], role: Role
) -> dict[str, float]:
    """Return the growth per second of each counter, mean over the serving processes of a role; the
    counter of a condition is its share of time. Empty if unknown.
    """
    past = {member.name: member for member in before}
    # A process that starts or exits is idle for reasons that say nothing about the balance.
    serving = [m for m in members if m.state not in ("starting", "draining", "ended")]
    each = (per_second(m, past.get(m.name)) for m in serving if m.role == role)
    known = [rates for rates in each if rates]
    names = {name for rates in known for name in rates}
    return {name: sum(rates.get(name, 0.0) for rates in known) / len(known) for name in names}


def bottleneck(members: Sequence[Member], before: Sequence[Member] = ()) -> str:
    """Return one sentence that names what delays the learner's steps most, with the measured
    shares; empty if unknown.
    """
    starting = sorted(m.name for m in members if m.state == "starting")
    if starting:
        return f"still starting: {', '.join(starting)}"
    # With agents the gateways make the groups.
    makers: Role = "gateway" if any(m.role == "gateway" for m in members) else "generator"
    learner = _mean_rates(members, before, "learner")
    generators = _mean_rates(members, before, makers)
    if not learner or not generators:
        return ""
    waits = learner.get("wait_s", 0.0)
    at_work = learner.get("busy_s", 0.0)
    held_back = generators.get("blocked_s", 0.0)
    if at_work >= waits:
        return (
            f"the learner: at work {at_work:.0%} of the time, generators held back by"
            f" admission {held_back:.0%}; {_LEARNER_RELIEF}"
        )
    # An engine is at work as soon as one of many sessions calls it.
    both = (*members, *before)
    num_open = sum(m.counters.get(f"{GAUGE}sessions/open", 0.0) for m in both)
    num_calling = sum(m.counters.get(f"{GAUGE}sessions/calling", 0.0) for m in both)
    busy = generators.get("busy_s", 0.0)
    outside = busy * (1 - num_calling / num_open) if num_open else 0.0
    upstream = {
        "generation": busy - outside,
        "agents": outside,
        "admission": held_back,
        "scoring": generators.get("wait_s", 0.0),
    }
    name = max(upstream, key=upstream.__getitem__)
    reason = _UPSTREAM[name].format(upstream[name])
    return f"{name}: the learner waits {waits:.0%} of the time, {reason}"
