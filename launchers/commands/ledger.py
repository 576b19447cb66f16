"""`async-rl ledger`: the history of every prompt of a run, as tables or JSON, also while it runs.

Reads the store of the run through async_rl/buffer/store/ledger.py and audit.py. Only --drop writes,
and only while no buffer does.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from async_rl.buffer.changes import Dropped
from async_rl.buffer.store.audit import Audit
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import (
    OF_GROUP,
    OF_PROMPT,
    OF_STATE,
    OF_STEP,
    LedgerGroup,
    LedgerSummary,
    histories,
    reading,
    summary,
)
from async_rl.buffer.store.store import Store
from async_rl.core.errors import ConfigError
from async_rl.core.types import DropReason, GroupState, Purpose
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, cell, console, print_table
from async_rl.runs.certificate.certify import audited
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of

_MOST_SHOWN = 50
_COLUMNS = (
    *("group_id", "prompt_id", "purpose", "state", "reason", "generator"),
    *("oldest_version", "train_version", "step", "rewards", "parts"),
)
_CLEAN = (
    "clean: every group is in one state, none is lost, none was trained twice, none was over age;"
    " every checkpoint has its checksums"
)
Answer = Sequence[LedgerGroup] | LedgerSummary | Audit


def ledger(
    run: Run = None,
    prompt: Annotated[str | None, typer.Option(help="the groups of this prompt")] = None,
    step: Annotated[int | None, typer.Option(help="the groups that this step trained")] = None,
    state: Annotated[str | None, typer.Option(help="the groups in this state")] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="check the history and the checkpoints; exit code 0 only if all is well"
        ),
    ] = False,
    drop: Annotated[int | None, typer.Option(help="drop this group of a stopped run")] = None,
    as_json: AsJson = False,
    output_dir: OutputDir = None,
) -> None:
    """Show the history of every prompt of a run, also while it runs.

    Examples: async-rl ledger; async-rl ledger my-run --step 12; async-rl ledger my-run --audit
    """
    of_groups = {OF_PROMPT: prompt, OF_STEP: step, OF_STATE: state}
    chosen = [(which, value) for which, value in of_groups.items() if value is not None]
    # Each is another question to the store, with another form of answer.
    if len(chosen) + (drop is not None) + audit > 1:
        raise ConfigError("give only one of --prompt, --step, --state, --audit and --drop")
    if state is not None and state not in tuple(GroupState):
        raise ConfigError(f"--state {state}: a group is one of {', '.join(GroupState)}")
    run_dir = find_run(run, output_dir)
    # Before the store is opened for reading: dropping opens it for writing.
    if drop is not None:
        asyncio.run(drop_group(run_dir / STORE_FILE, drop))
        typer.echo(f"group {drop} is dropped; async-rl resume {run_dir.name} trains others")
        return
    answer: Answer
    with reading(run_dir / STORE_FILE) as store:
        if chosen:
            answer = histories(store, *chosen[0])
        elif audit:
            answer = audited(run_dir, config_of(run_dir), store)
        else:
            answer = summary(store)
    if as_json:
        typer.echo(msgspec.json.encode(answer))
    else:
        match answer:
            case Audit():
                _show_audit(answer)
            case LedgerSummary():
                _show_summary(answer)
            case _:
                _show_groups(answer)
    if isinstance(answer, Audit) and answer.problems:
        raise typer.Exit(1)


async def drop_group(path: Path, group_id: int) -> None:
    """Drop a group that has not been trained. Raises ConfigError if it is none, Unavailable while
    the run's buffer writes the store.
    """
    with reading(path) as store:
        group = next(iter(histories(store, OF_GROUP, group_id)), None)
    if group is None or group.purpose != Purpose.TRAIN or group.state in ("trained", "dropped"):
        actual = "not in the store" if group is None else f"{group.state} ({group.purpose})"
        raise ConfigError(
            f"--drop {group_id}: the group is {actual}; only a training group can be dropped,"
            " before it is trained"
        )
    async with Store(path, clock=time.time) as store:
        reason = DropReason.UNTRAINABLE
        store.write([Dropped(group_id=group_id, reason=reason, message="by async-rl ledger")])
        # On the disk when the command returns: the next process may be on another machine.
        await store.secure()


def _show_audit(audited: Audit) -> None:
    undone = f" ({audited.num_undone_steps} more were undone)" if audited.num_undone_steps else ""
    lines = [
        f"{audited.num_groups} groups, {audited.num_transitions} changes of state,"
        f" {audited.num_steps} steps{undone}",
        *(f"wrong: {problem}" for problem in audited.problems),
        *(f"not checked: {gap}" for gap in audited.unchecked),
    ]
    console().print("\n".join(lines if audited.problems else [*lines, _CLEAN]), soft_wrap=True)


def _show_summary(summary: LedgerSummary) -> None:
    for name, value in msgspec.to_builtins(summary).items():
        # Most runs drop nothing and compact nothing.
        if value:
            console().print(f"{name.replace('_', ' '):20}{cell(value)}", soft_wrap=True)


def _show_groups(groups: Sequence[LedgerGroup]) -> None:
    if not groups:
        typer.echo("no group matches")
        return
    # The newest: a person inspects the latest events.
    rows = (
        (*(cell(getattr(group, name)) for name in _COLUMNS), _history(group))
        for group in groups[-_MOST_SHOWN:]
    )
    print_table((*(name.replace("_", " ") for name in _COLUMNS), "history"), rows)
    if len(groups) > _MOST_SHOWN:
        typer.echo(f"the newest {_MOST_SHOWN} of {len(groups)} groups; --json shows all")


def _history(group: LedgerGroup) -> str:
    """Return the first state with its time of day, and each later one with the seconds since."""
    first, *changes = group.history
    started_s = first.at_s
    clock = time.strftime("%H:%M:%S", time.localtime(started_s))
    parts = [f"{clock} {first.state}"]
    for change in changes:
        parts.append(f"+{change.at_s - started_s:.2f} s {change.state}")
    return ", ".join(parts)
