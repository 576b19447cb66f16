"""The answer of `async-rl status`: the numbers, the flow from prompt to training, the bottleneck,
and the work and the wait of each process.

Pure: from a StatusReply, an earlier one and the time to something rich can print.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from async_rl.monitoring.rates import commonest_failure, per_second
from async_rl.monitoring.terminal import WideTable, open_table
from async_rl.protocol.supervisor import Member, PoolCount, StatusReply

ROLE_ORDER = ("supervisor", "learner", "buffer", "generator", "gateway", "verifier")
_STYLES = {
    "waiting": "yellow",
    "blocked": "yellow",
    "starting": "cyan",
    "stopping": "cyan",
    "draining": "cyan",
    "ended": "red",
    "silent": "bold red",
}
_NUMBERS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out pass@1", "eval/pass_at_1", "{:.3f}"),
    ("staleness max", "staleness/max_versions", "{:.0f}"),
    ("generated tokens/s", "throughput/generated_tokens_per_s", "{:,.0f}"),
    ("sessions of agents", "sessions/open", "{:.0f}"),
    ("of them waiting for the engine", "sessions/calling", "{:.0f}"),
)
_FLOW = ("issued", "generating", "ready", "leased")
_RATES = (
    ("tokens_generated", "{:,.0f} tokens/s"),
    ("samples_scored", "{:,.0f} samples/s"),
    ("tokens_trained", "{:,.0f} tokens/s"),
)
_TRAINING = ("train", "both")
NOTHING_REWARDED = (
    "no sample has a reward above reward.fail_reward: scoring may be broken, or no prompt can be"
    " solved; see async-rl rollouts"
)


def render(
    reply: StatusReply,
    now_s: float | None = None,
    *,
    before: StatusReply | None = None,
) -> RenderableType:
    """The whole answer. now_s: Unix time; before: an earlier answer, for the rates."""
    now_s = time.time() if now_s is None else now_s
    head = Text.assemble(
        (reply.run_name, "bold"),
        f"  step {reply.step} of {reply.num_steps}, running for"
        f" {duration(now_s - reply.started_s)}\n{reply.run_dir}",
    )
    if reply.tensorboard_url:
        head.append(f"\nTensorBoard {reply.tensorboard_url}")
    numbers = [
        f"{title} {form.format(reply.metrics[name])}"
        for title, name, form in _NUMBERS
        if name in reply.metrics
    ]
    if numbers:
        head.append("\n" + "  ".join(numbers))
    # Before the first heartbeat of the buffer the flow is unknown.
    if any(f"queue/{state}" in reply.metrics for state in _FLOW):
        states = " → ".join(
            f"{state} {reply.metrics.get(f'queue/{state}', 0):.0f}" for state in _FLOW
        )
        head.append(f"\ngroups: prompt → {states} → trained in step {reply.step}")
        if failure := commonest_failure([reply.metrics]):
            head.append(f"   {failure}")
    if reply.pools:
        head.append(f"\n{'; '.join(_pool(pool, reply.pools) for pool in reply.pools)}")
    if reply.metrics.get("reward/failed_share") == 1:
        head.append(f"\nlast step: {NOTHING_REWARDED}", style="bold red")
    # The stall already says who waits for whom; a bottleneck would only repeat a part of it.
    if reply.stalled:
        head.append(f"\n{reply.stalled}", style="bold red")
    # Shares of time of a run with a silent process would name the wrong bottleneck.
    elif silent := ", ".join(m.name for m in reply.members if m.state == "silent"):
        head.append(f"\nno heartbeat from: {silent}", style="bold red")
    elif sentence := bottleneck(reply):
        head.append(f"\nbottleneck: {sentence}", style="cyan")
    return Group(head, _processes(reply, before, now_s))


def _pool(pool: PoolCount, pools: Sequence[PoolCount]) -> str:
    counts = {"live": pool.live, "starting": pool.starting, "draining": pool.draining}
    parts = [f"{number} {state}" for state, number in counts.items() if number]
    remedy = ""
    if pool.work == "evaluation" and pool.wanted == 0:
        remedy = f" (evaluations wait; async-rl scale {pool.pool}=1 continues)"
    elif pool.work in _TRAINING and not any(p.wanted for p in pools if p.work in _TRAINING):
        remedy = f" (async-rl scale {pool.pool}=1 continues)"
    return f"{pool.pool}: {pool.wanted} wanted, {', '.join(parts) or '0 live'}{remedy}"


def _processes(reply: StatusReply, before: StatusReply | None, now_s: float) -> WideTable:
    past = {member.name: member for member in before.members} if before else {}
    titles = ("process", "pid", "state", "version", "since", "at work", "rate", "waits for")
    table = open_table(*titles)
    for member in sorted(reply.members, key=lambda m: (ROLE_ORDER.index(m.role), m.name)):
        rates = per_second(member, past.get(member.name))
        waits_for = member.waits_for
        if number := reply.restarts.get(member.name):
            # The rest of a traceback is in the logs.
            reason = reply.restarted_because.get(member.name, "").partition("\n")[0]
            waits_for += f" (restarts: {number}; {reason})"
        table.add_row(
            member.name,
            str(member.pid),
            Text(member.state, style=_STYLES.get(member.state, "green")),
            str(member.version) if member.version >= 0 else "",
            duration(now_s - member.since_s) if member.since_s > 0 else "",
            f"{rates['busy_s']:.0%}" if "busy_s" in rates else "",
            ", ".join(form.format(rates[name]) for name, form in _RATES if name in rates),
            waits_for,
        )
    return table


def wait_of(member: Member, now_s: float) -> str:
    """Describe the wait of the process and its start. now_s: Unix time."""
    verb = "is held back by" if member.state == "blocked" else "waits for"
    return f"{member.name} {verb} {member.waits_for} ({duration(now_s - member.since_s)})"


def duration(seconds: float) -> str:
    """A time span in the two units that matter: `4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours = whole // 3600
    # Up to two days people count in hours.
    if hours < 48:
        return f"{hours} h {whole % 3600 // 60} min"
    return f"{hours // 24} d {hours % 24} h"


def short_path(path: Path) -> str:
    """Return the path relative to the working directory, if it is below it."""
    # A path that a person can copy, as short as possible.
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


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


def bottleneck(reply: StatusReply) -> str:
    """Return one sentence that names what delays the learner's steps most, with the shares of time
    of the newest step; empty if unknown.
    """
    starting = sorted(m.name for m in reply.members if m.state == "starting")
    if starting:
        return f"still starting: {', '.join(starting)}"
    metrics = reply.metrics
    # With agents the gateways make the groups.
    makers = "gateway" if "busy/gateway" in metrics else "generator"
    if "busy/learner" not in metrics or f"busy/{makers}" not in metrics:
        return ""
    waits = metrics.get("waiting/learner", 0.0)
    at_work = metrics["busy/learner"]
    held_back = metrics.get(f"blocked/{makers}", 0.0)
    if at_work >= waits:
        return (
            f"the learner: at work {at_work:.0%} of the time, generators held back by"
            f" admission {held_back:.0%}; {_LEARNER_RELIEF}"
        )
    # An engine is at work as soon as one of many sessions calls it.
    num_open = metrics.get("sessions/open", 0.0)
    num_calling = metrics.get("sessions/calling", 0.0)
    busy = metrics[f"busy/{makers}"]
    outside = busy * (1 - num_calling / num_open) if num_open else 0.0
    upstream = {
        "generation": busy - outside,
        "agents": outside,
        "admission": held_back,
        "scoring": metrics.get(f"waiting/{makers}", 0.0),
    }
    name = max(upstream, key=upstream.__getitem__)
    reason = _UPSTREAM[name].format(upstream[name])
    return f"{name}: the learner waits {waits:.0%} of the time, {reason}"
