"""`async-rl ledger`: the history of every prompt of a run, as tables or JSON, also while it runs.

Reads the store of the run through async_rl/buffer/store/ledger.py and audit.py. Only --drop writes,
and only while no buffer does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

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
)
from async_rl.buffer.store.ledger import summary as summarize
from async_rl.buffer.store.store import Store
from async_rl.core.errors import ConfigError
from async_rl.core.types import DropReason, GroupState, Purpose
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, console
from async_rl.monitoring.terminal import open_table
from async_rl.runs.certificate.certify import audited
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of

_MOST_SHOWN = 50
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
    summary: Annotated[bool, typer.Option("--summary", help="counts; the default")] = False,
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
    if len(chosen) + sum([drop is not None, summary, audit]) > 1:
        raise ConfigError(
            "give only one of --prompt, --step, --state, --summary, --audit and --drop"
        )
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
            answer = summarize(store)
    if as_json:
        typer.echo(msgspec.json.encode(answer))
    else:
        _show(console(), answer)
    if isinstance(answer, Audit) and answer.problems:
        raise typer.Exit(1)


def _show(terminal: Console, answer: Answer) -> None:
    match answer:
        case Audit():
            _show_audit(terminal, answer)
        case LedgerSummary():
            _show_summary(terminal, answer)
        case _:
            _show_groups(terminal, answer)


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


def _show_audit(terminal: Console, audited: Audit) -> None:
    undone = f" ({audited.num_undone_steps} more were undone)" if audited.num_undone_steps else ""
    terminal.print(
        f"{audited.num_groups} groups, {audited.num_transitions} changes of state,"
        f" {audited.num_steps} steps{undone}",
    )
    for problem in audited.problems:
        terminal.print(f"wrong: {problem}", soft_wrap=True)
    for gap in audited.unchecked:
        terminal.print(f"not checked: {gap}", soft_wrap=True)
    if not audited.problems:
        terminal.print(_CLEAN)


def _show_summary(terminal: Console, summary: LedgerSummary) -> None:
    undone = f", {summary.num_undone_steps} steps undone" if summary.num_undone_steps else ""
    ages = [f"{age} versions: {number}" for age, number in summary.staleness.items()]
    megabytes = summary.stored_bytes / 1e6
    rows = {
        "steps": f"{summary.learner_version}{undone}",
        "prompts issued": f"{summary.next_position} ({summary.num_prompts} different ones)",
        "left the data": f"{summary.num_left} prompts" if summary.num_left else "",
        "training groups": _listed(summary.states),
        "dropped because of": _listed(summary.dropped) or "nothing was dropped",
        "evaluation groups": _listed(summary.evaluation_states),
        "age when trained": "  ".join(ages),
        "trained by generator": _listed(summary.generators),
        "compacted": f"{summary.num_compacted} groups" if summary.num_compacted else "",
        "stored": f"{summary.num_stored} groups, {megabytes:.1f} MB of trajectories",
    }
    table = Table.grid(padding=(0, 1))
    for title, value in rows.items():
        # Rows that would be empty are left out: most runs drop nothing and compact nothing.
        if value:
            table.add_row(title, value)
    terminal.print(table)


def _listed(counts: dict[str, int]) -> str:
    return "  ".join(f"{name} {number}" for name, number in counts.items())


def _show_groups(terminal: Console, groups: Sequence[LedgerGroup]) -> None:
    if not groups:
        terminal.print("no group matches")
        return
    titles = "group,prompt,state,attempt,generator,versions,trained on,step,rewards,parts,history"
    table = open_table(*titles.split(","))
    # An id is copied into --prompt, so it is neither shortened nor broken.
    table.columns[1].no_wrap = True
    table.columns[1].min_width = max(len(group.prompt_id) for group in groups[-_MOST_SHOWN:])
    # The newest: a person inspects the latest events.
    for group in groups[-_MOST_SHOWN:]:
        versions = ""
        if group.oldest_version is not None:
            versions = f"{group.oldest_version}..{group.newest_version}"
        held_out = " (held out)" if group.purpose == "eval" else ""
        table.add_row(
            str(group.group_id),
            f"{group.prompt_id}{held_out}",
            f"{group.state} ({group.reason})" if group.reason else group.state,
            str(group.attempt),
            group.generator,
            versions,
            "" if group.train_version is None else str(group.train_version),
            "" if group.step is None else str(group.step),
            " ".join(f"{reward:g}" for reward in group.rewards),
            ", ".join(f"{name} {mean:.3g}" for name, mean in group.parts.items()),
            _history(group),
        )
    terminal.print(table)
    if len(groups) > _MOST_SHOWN:
        terminal.print(f"the newest {_MOST_SHOWN} of {len(groups)} groups; --json shows all")


def _history(group: LedgerGroup) -> str:
    """Return the first state with its time of day, and each later one with the seconds since."""
    first, *changes = group.history
    started_s = first.at_s
    clock = time.strftime("%H:%M:%S", time.localtime(started_s))
    parts = [f"{clock} {first.state}"]
    for change in changes:
        parts.append(f"+{change.at_s - started_s:.2f} s {change.state}")
    return ", ".join(parts)
