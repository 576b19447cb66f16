"""`async-rl rollouts`: read what the policy wrote, also while the run goes.

Reads the run's store and the tokenizer of the model it started from; loads neither torch nor
transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.rollouts import Rollout, rollouts, stored_steps
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.core.errors import ConfigError
from async_rl.core.types import Trajectory
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.options import OutputDir, Run, console, default_output_dir
from async_rl.monitoring.rollout_page import LEGEND, TOLD, Colour, is_passed, page

_MOST_GROUPS = 256


def show_rollouts(
    run: Run = None,
    step: Annotated[
        int | None, typer.Option(help="what this step trained; default: the newest groups")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="the highest rewards first")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="the lowest rewards first")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="only those that failed a test")] = False,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="how many, one of each group")] = 3,
    colour: Annotated[
        str, typer.Option(help="what a token's colour tells: logprob, version or advantage")
    ] = "logprob",
    output_dir: OutputDir = None,
) -> None:
    """Read what the policy wrote: prompt, response, verdicts, reward; one sample of each group.

    Examples: async-rl rollouts; async-rl rollouts --step 12 --failed; async-rl rollouts my-run
    --best --num 10 --colour version
    """
    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one")
    if colour not in get_args(Colour):
        raise ConfigError(f"--colour {colour}: is one of {', '.join(get_args(Colour))}")
    run_dir = runs.find(run, output_dir or default_output_dir())
    with reading(run_dir / STORE_FILE) as connection:
        stored, kept = rollouts(connection, step=step, most=_MOST_GROUPS), stored_steps(connection)
    chosen = choose(stored, is_best=best, is_worst=worst, is_failed=failed)[:num]
    terminal = console()
    if not chosen:
        span = f"steps {kept[0]} to {kept[1]} are stored" if kept else "no step is stored yet"
        terminal.print(
            f"no such rollout; {span} (those of older steps than buffer.keep_steps that no"
            " checkpoint needs are deleted)"
        )
        return
    decode = _decoder(run_dir)
    has_turns = any(
        not all(t.loss_mask[t.prompt_length :])
        for rollout, _ in chosen
        for t in rollout.group.trajectories
    )
    terminal.print(f"colours: {LEGEND[colour]}{f'; {TOLD}' if has_turns else ''}\n", style="dim")
    for rollout, index in chosen:
        pieces = _pieces(rollout.group.trajectories[index], decode)
        told: Colour = next(name for name in get_args(Colour) if name == colour)
        shown = page(
            rollout.group,
            index,
            prompt=rollout.prompt,
            step=rollout.step,
            pieces=pieces,
            colour=told,
            advantages=rollout.advantages,
        )
        terminal.print(shown)


def choose(
    stored: Sequence[Rollout], *, is_best: bool, is_worst: bool, is_failed: bool
) -> list[tuple[Rollout, int]]:
    """(group, index of one of its samples), in the order asked for; the order given if none is
    asked for.
    """
    chosen = []
    for rollout in stored:
        samples = rollout.group.trajectories
        indexes = [i for i, sample in enumerate(samples) if not (is_failed and is_passed(sample))]
        if indexes:
            sign = 1 if is_best else -1 if is_worst else 0
            chosen.append((rollout, max(indexes, key=lambda i: sign * samples[i].score.reward)))
    if is_best or is_worst:
        chosen.sort(
            key=lambda choice: choice[0].group.trajectories[choice[1]].score.reward, reverse=is_best
        )
    return chosen


def _pieces(sample: Trajectory, decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each response token adds to the one before it, so that they give the response
    when joined.
    """
    ids = sample.token_ids[sample.prompt_length :].tolist()
    texts = [decode(ids[:end]) for end in range(len(ids) + 1)]
    return [text[len(before) :] for before, text in itertools.pairwise(texts)]


def _decoder(run_dir: Path) -> Callable[[list[int]], str]:
    """From token ids to text, by the tokenizer of the run's model."""
    from tokenizers import Tokenizer

    from async_rl.runtime.context import load_control

    file = Path(load_control(run_dir).model_path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} is not there: the responses cannot be read without the model's fast tokenizer"
        )
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
