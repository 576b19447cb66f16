"""What `async-rl ledger` prints: groups with their history, counts, or the verdict of the audit;
for people or as JSON.

Reads the store through async_rl/buffer/store/ledger.py and store_audit.py; called by the command
line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from async_rl.buffer.store.audit import Audit, Promise, audit
from async_rl.buffer.store.ledger import (
    Ledger,
    LedgerGroup,
    LedgerSummary,
    LeftPrompt,
    Transition,
    reading,
)
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.types import GroupState

_MOST_SHOWN = 50


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asks the ledger; one of these, the summary if none."""

    prompt: str | None
    step: int | None
    state: str | None
    is_left: bool
    is_audit: bool


Answer = list[LedgerGroup] | tuple[LeftPrompt, ...] | LedgerSummary | Audit


def answer(run_dir: Path, config: RunConfig, question: Question) -> Answer:
    """Asks the run's store. Raises ConfigError for a state that does not exist."""
    with reading(run_dir / STORE_FILE) as connection:
        ledger = Ledger(connection)
        if question.prompt is not None:
            return ledger.of_prompt(question.prompt)
        if question.step is not None:
            return ledger.of_step(question.step)
        if question.state is not None:
            if question.state not in tuple(GroupState):
                raise ConfigError(
                    f"--state {question.state}: a group is one of {', '.join(GroupState)}"
                )
            return ledger.of_state(GroupState(question.state))
        if question.is_left:
            return ledger.left()
        return audit(connection, promise_of(config)) if question.is_audit else ledger.summary()


def promise_of(config: RunConfig) -> Promise:
    """What the run promised."""
    buffer = config.buffer
    return Promise(
        groups_per_step=buffer.groups_per_step,
        max_staleness_versions=buffer.max_staleness_versions,
        over_age=buffer.over_age,
    )


def show(console: Console, found: Answer) -> None:
    """The answer for people."""
    if isinstance(found, Audit):
        _show_audit(console, found)
    elif isinstance(found, LedgerSummary):
        _show_summary(console, found)
    elif isinstance(found, tuple):
        _show_left(console, found)
    else:
        _show_groups(console, found)


def _show_audit(console: Console, found: Audit) -> None:
    undone = f" ({found.num_undone_steps} more were undone)" if found.num_undone_steps else ""
    console.print(
        f"{found.num_groups} groups, {found.num_transitions} changes of state, {found.num_steps}"
        f" steps{undone}",
        markup=False,
    )
    for problem in found.problems:
        console.print(f"wrong: {problem}", markup=False, soft_wrap=True)
    if not found.problems:
        console.print(
            "clean: every group is in one state, none is lost, none was trained twice, none was"
            " over age"
        )


def _show_summary(console: Console, found: LedgerSummary) -> None:
    undone = f", {found.num_undone_steps} steps undone" if found.num_undone_steps else ""
    lines = [
        ("steps", f"{found.learner_version}{undone}"),
        ("prompts issued", f"{found.next_position} ({found.num_prompts} different ones)"),
        ("left the data", f"{found.num_left} prompts" if found.num_left else ""),
        ("training groups", _listed(found.states)),
        ("dropped because of", _listed(found.dropped) or "nothing was dropped"),
        ("evaluation groups", _listed(found.evaluation_states)),
        (
            "age when trained",
            "  ".join(f"{age} versions: {number}" for age, number in found.staleness.items()),
        ),
        ("trained by generator", _listed(found.generators)),
        ("stored", f"{found.num_stored} groups, {found.stored_bytes / 1e6:.1f} MB of trajectories"),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, value in lines:
        if value:
            table.add_row(what, value)
    console.print(table)


def _listed(counts: dict[str, int]) -> str:
    return "  ".join(f"{name} {number}" for name, number in counts.items())


def _show_left(console: Console, found: Sequence[LeftPrompt]) -> None:
    table = Table(
        "prompt",
        "mean reward",
        "absent from position",
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for left in found:
        table.add_row(left.prompt_id, f"{left.score:.3g}", str(left.position))
    console.print(table if found else "no prompt left the data")


def _show_groups(console: Console, groups: Sequence[LedgerGroup]) -> None:
    if not groups:
        console.print("no such group")
        return
    columns = (
        "group",
        "prompt",
        "state",
        "attempt",
        "generator",
        "versions",
        "trained on",
        "step",
        "rewards",
        "parts",
        "history",
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for group in groups[-_MOST_SHOWN:]:
        versions = (
            f"{group.oldest_version}..{group.newest_version}"
            if group.oldest_version is not None
            else ""
        )
        table.add_row(
            str(group.group_id),
            group.prompt_id + (" (held out)" if group.purpose == "eval" else ""),
            f"{group.state} ({group.reason})" if group.reason else group.state,
            str(group.attempt),
            group.generator,
            versions,
            "" if group.train_version is None else str(group.train_version),
            "" if group.step is None else str(group.step),
            " ".join(f"{reward:g}" for reward in group.rewards),
            ", ".join(f"{name} {mean:.3g}" for name, mean in group.parts.items()),
            _history(group.history),
        )
    console.print(table)
    if len(groups) > _MOST_SHOWN:
        console.print(f"the newest {_MOST_SHOWN} of {len(groups)} groups; --json gives all")


def _history(history: Sequence[Transition]) -> str:
    """Each change after the first with the seconds since then."""
    started_s = history[0].at_s
    clock = time.strftime("%H:%M:%S", time.localtime(started_s))
    parts = [
        f"{clock} {history[0].state}",
        *(f"+{change.at_s - started_s:.2f} s {change.state}" for change in history[1:]),
    ]
    return ", ".join(parts)
