"""The bottleneck of a run as a sentence, with a remedy, from the counters of two moments.

A process is measured against its own time between the two moments; a process that was restarted
between them, against its whole age. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.core.types import PoolCount, Role
from async_rl.observability.activity import GAUGE
from async_rl.planning.scaling import balanced
from async_rl.protocol.membership import Member

_AGE = ("busy_s", "wait_s", "blocked_s", "idle_s")
_RELIEF = {
    "learner": (
        "more ranks (learner.ranks) on additional cores or GPUs relieve it; more generators do not"
    ),
    "admission": (
        "a looser bound (buffer.max_staleness_versions) or smaller steps (buffer.groups_per_step)"
        " relieve it"
    ),
    "generation": (
        "more generators (generators.count) on additional cores or GPUs, or shorter answers,"
        " relieve it; more ranks do not"
    ),
    "scoring": (
        "more cells or verifiers (verifiers.cells, verifiers.count) on additional cores relieve"
        " it; more generators do not"
    ),
}

_MARGIN = 0.1
"""Share of time. Without it, a balanced run would name another bottleneck in every report."""
_TOLERATED = 0.1
_WORTH_TELLING = 0.5
"""In generators; smaller differences are not reported."""


def per_second(now: Member, before: Member | None) -> dict[str, float]:
    """Return the growth of each counter per second of the process's own time; empty if unknown."""
    past: Mapping[str, float] = (
        before.counters if before is not None and before.pid == now.pid else {}
    )
    grown = {
        name: value - past.get(name, 0.0)
        for name, value in now.counters.items()
        if not name.startswith(GAUGE)
    }
    age_s = sum(grown.get(name, 0.0) for name in _AGE)
    return {name: value / age_s for name, value in grown.items()} if age_s > 0 else {}


def share(
    members: Sequence[Member], before: Sequence[Member], role: Role, condition: str
) -> float | None:
    """Return the mean share of time in a condition over the serving processes of a role; None if
    unknown.
    """
    past = {member.name: member for member in before}
    serving = [
        m for m in members if m.role == role and m.state not in ("starting", "draining", "ended")
    ]
    found = [rates for m in serving if (rates := per_second(m, past.get(m.name)))]
    return sum(rates.get(condition, 0.0) for rates in found) / len(found) if found else None


def total_rate(
    members: Sequence[Member], before: Sequence[Member], role: Role, counter: str
) -> float:
    """Return the growth per second of a counter, summed over the processes of a role."""
    past = {member.name: member for member in before}
    return sum(per_second(m, past.get(m.name)).get(counter, 0.0) for m in members if m.role == role)


def bottleneck(members: Sequence[Member], before: Sequence[Member] = (), *, last: str = "") -> str:
    """Return one sentence that names what delays the learner's steps most, with the measured
    shares; empty if unknown.

    last: the previous sentence. Its bottleneck is kept until another is worse by _MARGIN.
    """
    starting = sorted(m.name for m in members if m.state == "starting")
    if starting:
        return f"not all is up yet: {', '.join(starting)}"
    at_work, waits = (
        share(members, before, "learner", "busy_s"),
        share(members, before, "learner", "wait_s"),
    )
    writing, held = (
        share(members, before, "generator", "busy_s"),
        share(members, before, "generator", "blocked_s"),
    )
    unscored = share(members, before, "generator", "wait_s")
    if at_work is None or waits is None or writing is None or held is None or unscored is None:
        return ""

    def weight(name: str, of_time: float) -> float:
        return of_time + (_MARGIN if last.startswith(f"{name}:") else 0.0)

    was_upstream = (
        _MARGIN if last.partition(":")[0] in ("admission", "scoring", "generation") else 0.0
    )
    if weight("the learner", at_work) >= waits + was_upstream:
        return (
            f"the learner: at work {at_work:.0%} of the time, generators held back by admission"
            f" {held:.0%}; {_RELIEF['learner']}"
        )
    what = f"the learner waits {waits:.0%} of the time"
    shares = {"generation": writing, "admission": held, "scoring": unscored}
    name = max(shares, key=lambda one: weight(one, shares[one]))
    reasons = {
        "generation": f"generators write {writing:.0%}",
        "admission": f"generators are held back {held:.0%}",
        "scoring": f"generators have only verdicts to wait for {unscored:.0%}",
    }
    return f"{name}: {what}, {reasons[name]}; {_RELIEF[name]}"


def advice(
    members: Sequence[Member], before: Sequence[Member] = (), *, pools: Sequence[PoolCount] = ()
) -> str:
    """Return how many generators to add or remove to balance the run; empty if it is balanced.

    pools: the pools whose size may change.
    """
    waits, held = (
        share(members, before, "learner", "wait_s"),
        share(members, before, "generator", "blocked_s"),
    )
    unscored, writing = (
        share(members, before, "generator", "wait_s"),
        share(members, before, "generator", "busy_s"),
    )
    if (
        waits is None
        or held is None
        or unscored is None
        or writing is None
        or any(m.state in ("starting", "draining") for m in members)
    ):
        return ""
    count = sum(m.role == "generator" and m.state != "ended" for m in members)
    off = balanced(count, learner_waits=waits, held_back=held) - count
    if (
        max(waits, held) < _TOLERATED
        or abs(off) < _WORTH_TELLING
        or (off > 0 and unscored > writing)
    ):
        return ""
    who = (
        f"learner waits {waits:.0%} of the time"
        if off > 0
        else f"generators are held back {held:.0%} of the time"
    )
    able = [
        pool.pool for pool in pools if pool.work in ("train", "both") and (pool.wanted or off > 0)
    ]
    where = f" ({' or '.join(able)})" if len(able) > 1 else ""
    return (
        f"{who}: about {min(abs(off), 2.0 * count):.1f} generators {'more' if off > 0 else 'fewer'}"
        f" would balance{where}"
    )
