"""Which part of a run holds up the others, in words, and what would relieve it; from the counters of two moments.

A process is measured against its own age between the two moments; one that was started again meanwhile, against its whole age.
Pure; used by the answer of `async-rl status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.messages import Member
from async_rl.observability.activity import GAUGE
from async_rl.types import Role

_AGE = ("busy_s", "wait_s", "blocked_s", "idle_s")
_RELIEF = {
    "learner": "more ranks (learner.ranks) on cores or GPUs of their own relieve it; more generators do not",
    "admission": "a looser bound (buffer.max_staleness_versions) or smaller steps (buffer.groups_per_step) relieve it",
    "generation": "more generators (generators.count) on cores or GPUs of their own, or shorter answers, relieve it; more ranks do not",
    "scoring": "more cells or verifiers (verifiers.cells, verifiers.count) on cores of their own relieve it; more generators do not",
}


def per_second(now: Member, before: Member | None) -> dict[str, float]:
    """What each counter grew by in a second of the process's own time; empty if nothing is known yet."""
    past: Mapping[str, float] = before.counters if before is not None and before.pid == now.pid else {}
    grown = {name: value - past.get(name, 0.0) for name, value in now.counters.items() if not name.startswith(GAUGE)}
    age_s = sum(grown.get(name, 0.0) for name in _AGE)
    return {name: value / age_s for name, value in grown.items()} if age_s > 0 else {}


def bottleneck(members: Sequence[Member], before: Sequence[Member] = ()) -> str:
    """One sentence on what the learner's steps wait for most, with the shares that say so; empty while that is not known."""
    past = {member.name: member for member in before}
    starting = sorted(m.name for m in members if m.state == "starting")
    if starting:
        return f"not all is up yet: {', '.join(starting)}"

    def share(role: Role, condition: str) -> float:
        found = [rates for m in members if m.role == role and (rates := per_second(m, past.get(m.name)))]
        return sum(rates.get(condition, 0.0) for rates in found) / len(found) if found else -1.0

    at_work, waits = share("learner", "busy_s"), share("learner", "wait_s")
    writing, held, unscored = share("generator", "busy_s"), share("generator", "blocked_s"), share("generator", "wait_s")
    if at_work < 0 or writing < 0:
        return ""
    if at_work >= waits:
        return f"the learner: at work {at_work:.0%} of the time, generators held back by admission {held:.0%}; {_RELIEF['learner']}"
    what = f"the learner waits {waits:.0%} of the time"
    if held > max(writing, unscored):
        return f"admission: {what}, generators are held back {held:.0%}; {_RELIEF['admission']}"
    if unscored > writing:
        return f"scoring: {what}, generators have only verdicts to wait for {unscored:.0%}; {_RELIEF['scoring']}"
    return f"generation: {what}, generators write {writing:.0%}; {_RELIEF['generation']}"
