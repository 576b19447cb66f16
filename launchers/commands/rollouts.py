"""`async-rl rollouts`: shows sampled responses with their verdicts, also while the run continues.

Reads the run's store and the tokenizer of its start model; loads neither torch nor transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.buffer.store.browse import Filter
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import Rollout, stored_steps
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import OutputDir, Run, console
from async_rl.monitoring.rollout_page import LEGEND, NOT_SAMPLED, Colour, page
from async_rl.runs.directory import find_run
from async_rl.runs.samples import decoder, pieces, stored_rollouts


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
    colour: Annotated[
        Colour, typer.Option("--colour", "--color", help="meaning of a token's colour")
    ] = Colour.LOGPROB,
    export: Annotated[
        Path | None,
        typer.Option(
            help="write every stored sample of --step and --failed to this .jsonl or .parquet file"
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Show sampled responses: prompt, response, verdicts, reward; one sample of each group.

    Examples: async-rl rollouts; async-rl rollouts --step 12 --failed; async-rl rollouts my-run
    --best --num 10 --colour version; async-rl rollouts my-run --export samples.parquet
    """
    # One sample of each group is shown, and it is one of the two.
    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one")
    run_dir = find_run(run, output_dir)
    if export is not None:
        number = write(run_dir, export, Filter(step=step, failed=failed))
        console().print(f"{number} samples are in {export}", soft_wrap=True)
        return
    stored = stored_rollouts(run_dir, step=step)
    chosen = choose(stored, is_best=best, is_worst=worst, is_failed=failed)[:num]
    terminal = console()
    if not chosen:
        terminal.print(_why_none(run_dir))
        return
    decode = decoder(run_dir)
    legend = LEGEND[colour]
    if any(_has_turns(rollout) for rollout, _ in chosen):
        legend += f"; {NOT_SAMPLED}"
    terminal.print(f"colours: {legend}\n", style="dim")
    for rollout, index in chosen:
        shown = page(
            rollout.group,
            index,
            prompt=rollout.prompt,
            step=rollout.step,
            pieces=pieces(rollout.group.trajectories[index], decode),
            colour=colour,
            advantages=rollout.advantages,
        )
        terminal.print(shown)


def _why_none(run_dir: Path) -> str:
    with reading(run_dir / STORE_FILE) as connection:
        kept = stored_steps(connection)
    span = f"steps {kept[0]} to {kept[1]} are stored" if kept else "no step is stored yet"
    return (
        f"no such rollout; {span} (older steps are deleted unless a checkpoint needs"
        " them or recording=full keeps them)"
    )


def write(run_dir: Path, file: Path, chosen: Filter) -> int:
    """Write the stored samples of the groups that pass a filter, and return their number. Raises
    ConfigError for an unknown format or a file that exists.
    """
    from async_rl.runs.view.export import FORMS, rows  # pyarrow takes a while to import

    form = FORMS.get(file.suffix.removeprefix("."))
    if form is None:
        raise ConfigError(f"--export {file}: name a file with the suffix .jsonl or .parquet")
    if file.exists():
        raise ConfigError(f"--export {file}: the file exists; choose another name or delete it")
    number = itertools.count()
    # Counted while they stream: a store may hold more samples than memory.
    samples = (row for row in rows(run_dir, decoder(run_dir), chosen) if next(number) >= 0)
    with file.open("wb") as target:
        target.writelines(form.stream(samples))
    return next(number)


def choose(
    stored: Sequence[Rollout], *, is_best: bool, is_worst: bool, is_failed: bool
) -> list[tuple[Rollout, int]]:
    """Return (group, index of one of its samples), in the requested or the given order."""
    sign = int(is_best) - int(is_worst)
    chosen = []
    for rollout in stored:
        samples = rollout.group.trajectories
        indexes = [
            i for i, sample in enumerate(samples) if not (is_failed and sample.score.is_passed)
        ]
        if indexes:
            rewards = {i: sign * samples[i].score.reward for i in indexes}
            chosen.append((rollout, max(indexes, key=rewards.__getitem__)))
    if sign:
        chosen.sort(key=lambda pair: -sign * pair[0].group.trajectories[pair[1]].score.reward)
    return chosen


def _has_turns(rollout: Rollout) -> bool:
    """Return whether a response contains tokens that the policy did not sample."""
    samples = rollout.group.trajectories
    return any(not all(sample.loss_mask[sample.prompt_length :]) for sample in samples)
