"""`async-rl rollouts`: shows sampled responses with their verdicts, also while the run continues.

Reads the run's store and the tokenizer of its start model; loads neither torch nor transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.rollouts import Rollout, rollouts, stored_steps
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.core.errors import ConfigError
from async_rl.core.types import Trajectory
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.options import OutputDir, Run, console, default_output_dir
from async_rl.monitoring.rollout_page import LEGEND, NOT_SAMPLED, Colour, is_passed, page

_MOST_GROUPS = 256


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
    colour: Annotated[Colour, typer.Option(help="meaning of a token's colour")] = Colour.LOGPROB,
    output_dir: OutputDir = None,
) -> None:
    """Show sampled responses: prompt, response, verdicts, reward; one sample of each group.

    Examples: async-rl rollouts; async-rl rollouts --step 12 --failed; async-rl rollouts my-run
    --best --num 10 --colour version
    """
    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one")
    run_dir = runs.find(run, output_dir or default_output_dir())
    with reading(run_dir / STORE_FILE) as connection:
        stored = rollouts(connection, step=step, most=_MOST_GROUPS)
        kept = stored_steps(connection)
    chosen = choose(stored, is_best=best, is_worst=worst, is_failed=failed)[:num]
    terminal = console()
    if not chosen:
        span = f"steps {kept[0]} to {kept[1]} are stored" if kept else "no step is stored yet"
        terminal.print(
            f"no such rollout; {span} (steps older than buffer.keep_steps are deleted unless a"
            " checkpoint needs them)"
        )
        return
    decode = _decoder(run_dir)
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
            pieces=_pieces(rollout.group.trajectories[index], decode),
            colour=colour,
            advantages=rollout.advantages,
        )
        terminal.print(shown)


def choose(
    stored: Sequence[Rollout], *, is_best: bool, is_worst: bool, is_failed: bool
) -> list[tuple[Rollout, int]]:
    """Return (group, index of one of its samples), in the order asked for, else in that given."""
    sign = 1 if is_best else -1 if is_worst else 0
    chosen = []
    for rollout in stored:
        samples = rollout.group.trajectories
        indexes = [i for i, sample in enumerate(samples) if not (is_failed and is_passed(sample))]
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


def _pieces(sample: Trajectory, decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text that each response token adds; joined, the pieces are the response."""
    ids = sample.token_ids[sample.prompt_length :].tolist()
    texts = [decode(ids[:end]) for end in range(len(ids) + 1)]
    return [text[len(before) :] for before, text in itertools.pairwise(texts)]


def _decoder(run_dir: Path) -> Callable[[list[int]], str]:
    """Return the function from token ids to text, of the tokenizer of the run's model."""
    from tokenizers import Tokenizer

    from async_rl.runtime.context import load_control

    file = Path(load_control(run_dir).model_path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist; the responses cannot be decoded without the model's fast"
            " tokenizer"
        )
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
