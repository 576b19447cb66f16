"""The sentence about a run without progress: who waits for what. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.monitoring.rates import commonest_failure
from async_rl.monitoring.status import duration, wait_of
from async_rl.protocol.membership import Member

_CHAIN = ("learner", "buffer", "gateway", "generator", "verifier")
"""Each role waits for the next one."""
_NEEDED = ("generator", "verifier")
_MOST_PARTS = 8  # the first ones name the cause; a pool of 100 generators would fill the screen
_AWAY = ("starting", "ended")
_AT_REST = ("ready", "serving")


def sentence(
    members: Sequence[Member], *, stalled_s: float, now_s: float, unheard_s: Mapping[str, float]
) -> str:
    """Return a sentence that lists the silent processes, then which process waits for what and
    since when, the learner first. A working process is listed if its state has not changed for
    more than half of the stall.

    now_s: Unix time, as in heartbeats.
    """
    version = max((m.version for m in members if m.role == "learner"), default=-1)
    problem = "the learner has not started"
    if version >= 0:
        problem = f"no learner step after version {version}"
    # A missing role explains the stall, so it comes first.
    serving = {m.role for m in members if m.state not in _AWAY}
    parts = [f"no {role} serves" for role in _NEEDED if role not in serving]
    # An outage of what scores looks like a wait for a batch; its reason must not be lost.
    failure = commonest_failure(member.counters for member in members)
    parts += [failure] if failure else []
    parts += [
        f"{name} has sent no heartbeat for {duration(silent_s)}"
        for name, silent_s in sorted(unheard_s.items())
    ]
    for member in sorted(members, key=lambda m: (_CHAIN.index(m.role), m.name)):
        if member.name in unheard_s:
            continue
        since_s = now_s - member.since_s
        # A process at work explains a stall only if it has done the same for most of it.
        is_stuck = member.state not in _AT_REST and 2 * since_s > stalled_s
        if member.waits_for:
            parts.append(wait_of(member, now_s))
        elif member.role == "learner" or member.state in _AWAY or is_stuck:
            parts.append(f"{member.name}: {member.state} ({duration(since_s)})")
    if len(parts) > _MOST_PARTS:
        parts[_MOST_PARTS:] = [f"and {len(parts) - _MOST_PARTS} more"]
    return f"{problem} for {duration(stalled_s)}: {'; '.join(parts)}"
