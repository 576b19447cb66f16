"""The answer of `async-rl status`: what each process of a run is, does, and waits for, as a rich table.

Pure: from a StatusReply and the time to something rich can print.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from async_rl.messages import Member, StatusReply

_ROLE_ORDER = ("supervisor", "learner", "buffer", "generator", "verifier")
_STYLES = {"waiting": "yellow", "blocked": "yellow", "starting": "cyan", "stopping": "cyan", "ended": "red"}
_NUMBERS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out pass@1", "eval/pass_at_1", "{:.3f}"),
    ("staleness max", "staleness/max_versions", "{:.0f}"),
    ("generated tokens/s", "throughput/generated_tokens_per_s", "{:,.0f}"),
    ("ready groups", "queue/ready", "{:.0f}"),
)


def render(reply: StatusReply, now_s: float | None = None) -> RenderableType:
    """The whole answer. now_s: Unix time."""
    now_s = time.time() if now_s is None else now_s
    head = Text.assemble(
        (reply.run_name, "bold"),
        f"  step {reply.step} of {reply.num_steps}, running for {duration(now_s - reply.started_s)}\n{reply.run_dir}",
    )
    if reply.tensorboard_url:
        head.append(f"\nTensorBoard {reply.tensorboard_url}")
    numbers = [f"{title} {form.format(reply.metrics[name])}" for title, name, form in _NUMBERS if name in reply.metrics]
    if numbers:
        head.append("\n" + "  ".join(numbers))
    if reply.stalled:
        head.append(f"\n{reply.stalled}", style="bold red")
    return Group(head, _processes(reply.members, now_s))


def _processes(members: Iterable[Member], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title, justify in (("process", "left"), ("pid", "right"), ("state", "left"), ("version", "right"), ("since", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("waits for")
    for member in sorted(members, key=lambda m: (_ROLE_ORDER.index(m.role), m.name)):
        table.add_row(
            member.name,
            str(member.pid),
            Text(member.state, style=_STYLES.get(member.state, "green")),
            str(member.version) if member.version >= 0 else "",
            duration(now_s - member.since_s) if member.since_s > 0 else "",
            member.waits_for,
        )
    return table


def duration(seconds: float) -> str:
    """A time span in the two units that matter: `4 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
