"""The commands that show what a run has stored, also while it runs: `async-rl ledger`, `rollouts`.

Only ledger --drop writes, and only while no buffer does. Neither torch nor transformers is loaded:
the tokenizer of the start model decodes the samples.
"""

import asyncio
import bisect
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from async_rl.buffer.changes import Dropped
from async_rl.buffer.store.ledger import (
    OF_GROUP,
    OF_PROMPT,
    OF_STATE,
    OF_STEP,
    Audit,
    LedgerGroup,
    LedgerSummary,
    histories,
    reading,
    summary,
)
from async_rl.buffer.store.store import Store
from async_rl.core.errors import ConfigError
from async_rl.core.types import DropReason, Group, GroupState, Purpose, Trajectory
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, cell, console, print_table
from async_rl.runs.certificate.certify import audited
from async_rl.runs.directory import find_run
from async_rl.runs.samples import (
    MOST_GROUPS,
    Decode,
    Sample,
    decoder,
    lines,
    samples,
    verdicts_of,
    why_none,
)
from async_rl.runs.status import config_of

_MOST_SHOWN = 50
_COLUMNS = (
    *("group_id", "prompt_id", "purpose", "state", "reason", "generator"),
    *("oldest_version", "train_version", "step", "rewards", "parts"),
)
_CLEAN = (
    "clean: every group is in one state, none is lost, none is in two batches, none was over age;"
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
        asyncio.run(drop_group(run_dir, drop))
        typer.echo(f"group {drop} is dropped; async-rl resume {run_dir.name} trains others")
        return
    answer: Answer
    with reading(run_dir) as store:
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
                for name, value in msgspec.to_builtins(answer).items():
                    # Most runs drop nothing and compact nothing.
                    if value:
                        shown = f"{name.replace('_', ' '):20}{cell(value)}"
                        console().print(shown, soft_wrap=True)
            case _:
                _show_groups(answer)
    if isinstance(answer, Audit) and answer.problems:
        raise typer.Exit(1)


async def drop_group(run_dir: Path, group_id: int) -> None:
    """Drop a group that has not been trained. Raises ConfigError if it is none, Unavailable while
    the run's buffer writes the store.
    """
    with reading(run_dir) as store:
        group = next(iter(histories(store, OF_GROUP, group_id)), None)
    if group is None or group.purpose != Purpose.TRAIN or group.state in ("trained", "dropped"):
        actual = "not in the store" if group is None else f"{group.state} ({group.purpose})"
        raise ConfigError(
            f"--drop {group_id}: the group is {actual}; only a training group can be dropped,"
            " before it is trained"
        )
    async with Store(run_dir, clock=time.time) as store:
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


def show_rollouts(
    run: Run = None,
    step: Annotated[
        int | None, typer.Option(help="groups that this step trained; default: the newest groups")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="the highest rewards first")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="the lowest rewards first")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="only those that failed a test")] = False,
    num: Annotated[
        int, typer.Option("--num", "-n", min=1, help="number of samples, one of each group")
    ] = 3,
    export: Annotated[
        Path | None,
        typer.Option(help="write every stored sample of --step and --failed to this .jsonl file"),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Show sampled responses: prompt, response, verdicts, reward; one sample of each group. The
    pages of `async-rl view` colour the tokens too.

    Examples: async-rl rollouts; async-rl rollouts --step 12 --failed; async-rl rollouts my-run
    --best --num 10; async-rl rollouts my-run --export samples.jsonl
    """
    # One sample of each group is shown, and it is one of the two.
    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one")
    run_dir = find_run(run, output_dir)
    if export is not None:
        # One by one: a store may hold more samples than memory.
        written = lines(run_dir, decoder(run_dir), step=step, failed=failed)
        with export.open("xb") as target:
            target.writelines(written)
        console().print(f"the samples are in {export}", soft_wrap=True)
        return
    terminal = console()
    found = samples(run_dir, step=step, failed=failed, most=MOST_GROUPS)
    if not found:
        terminal.print(why_none(run_dir))
        return
    for sample in choose(found, sign=best - worst)[:num]:
        terminal.print(*_lines(sample), sep="\n", end="\n\n")


def choose(found: Iterable[Sample], *, sign: int) -> list[Sample]:
    """Return one sample of each group: 1 = the highest rewards first, -1 = the lowest, 0 = in the
    given order.
    """
    chosen: dict[int, Sample] = {}
    for sample in sorted(found, key=lambda sample: -sign * sample.score.reward):
        chosen.setdefault(sample.rollout.group.group_id, sample)
    return list(chosen.values())


def _lines(shown: Sample) -> tuple[Text, ...]:
    """Return title, prompt, response and score of a sample."""
    group = shown.rollout.group
    sample = shown.trajectory
    versions = sample.versions[sample.loss_mask]
    span = f"versions {min(versions)} to {max(versions)}" if len(versions) else "nothing trained"
    trained = "not trained yet" if shown.step is None else f"step {shown.step}"
    title = f"group {group.group_id}, sample {shown.index}  {group.prompt_id}  {trained}"
    return (
        Text(f"{title}  {group.generator}  {span}", style="bold"),
        Text(shown.prompt.strip(), style="dim"),
        Text(response_text(sample, shown.decode)),
        Text(_score(group, sample), style="green" if sample.score.is_passed else "red"),
    )


def response_text(sample: Trajectory, decode: Decode) -> str:
    """Return the response, with the text that the policy did not sample in ⟨ ⟩. A segment of an
    agent's session has a line before it, because it repeats what it shares with an earlier one.
    """

    def part(position: int) -> tuple[int, bool]:
        return bisect.bisect(starts, position), bool(sample.loss_mask[position])

    starts = [start for start, _ in sample.branches]
    text = ""
    before = 0
    # What all agents of a group read first is a part of their prompt, as a segment of its own.
    positions = range(min([sample.prompt_length, *starts]), len(sample.token_ids))
    for (segment, is_sampled), same in itertools.groupby(positions, part):
        if segment > before:
            text += "\n[segment]\n"
            before = segment
        written = decode(sample.token_ids[list(same)].tolist())
        text += written if is_sampled else f"\u27e8{written}\u27e9"
    return text


def _score(group: Group, sample: Trajectory) -> str:
    """Return the reward with its parts and the verdicts, with equal neighbours counted."""
    score = sample.score
    mean = statistics.fmean(one.score.reward for one in group.trajectories)
    text = f"reward {score.reward:g} (mean of its group {mean:.2f})"
    for name, value in sorted(score.parts.items()):
        text += f", {name} {value:g}"
    if sample.is_truncated:
        text += ", cut at the length limit"
    # Functions alone run no test, and only programs compile.
    if "compiles" in score.parts or not score.parts:
        verdicts = [f"{n} x {name}" if n > 1 else name for name, n in verdicts_of(sample)]
        text += f"; tests: {', '.join(verdicts) or 'no test was run'}"
    elif "tests_passed" in score.parts:
        text += f"; the answer is {'right' if score.is_passed else 'wrong'}"
    for number, call in enumerate(sample.calls):
        trained = f"reward {call.reward:g}" if call.end_tokens else "not trained"
        text += f"\ncall {number} {call.role}: {call.num_tokens} tokens, {trained}"
    if score.failure:
        text += f"\nfirst failure: {score.failure}"
    return text
