"""`async-rl rollouts`: shows sampled responses with their verdicts, also while the run continues.

Reads the run's store and the tokenizer of its start model; loads neither torch nor transformers.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from async_rl.buffer.store.browse import Filter
from async_rl.buffer.store.trajectories import Rollout
from async_rl.core.errors import ConfigError
from async_rl.core.types import Group, Trajectory
from async_rl.launchers.commands.options import OutputDir, Run, console
from async_rl.runs.directory import find_run
from async_rl.runs.samples import Decode, decoder, stored_rollouts, verdicts_of, why_none
from async_rl.runs.view.export import lines


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
        number = write(run_dir, export, Filter(step=step, failed=failed))
        console().print(f"{number} samples are in {export}", soft_wrap=True)
        return
    stored = stored_rollouts(run_dir, step=step)
    chosen = choose(stored, is_best=best, is_worst=worst, is_failed=failed)[:num]
    terminal = console()
    if not chosen:
        terminal.print(why_none(run_dir))
        return
    decode = decoder(run_dir)
    for rollout, index in chosen:
        terminal.print(*_lines(rollout, index, decode), sep="\n", end="\n\n")


def _lines(rollout: Rollout, index: int, decode: Decode) -> tuple[Text, ...]:
    """Return title, prompt, response and score of a sample."""
    group = rollout.group
    sample = group.trajectories[index]
    versions = sample.versions[sample.loss_mask]
    span = f"versions {min(versions)} to {max(versions)}" if len(versions) else "nothing trained"
    trained = "not trained yet" if rollout.step is None else f"step {rollout.step}"
    title = f"group {group.group_id}, sample {index}  {group.prompt_id}  {trained}"
    return (
        Text(f"{title}  {group.generator}  {span}", style="bold"),
        Text(rollout.prompt.strip(), style="dim"),
        Text(response_text(sample, decode)),
        Text(_score(group, sample), style="green" if sample.score.is_passed else "red"),
    )


def response_text(sample: Trajectory, decode: Decode) -> str:
    """Return the response, with the text that the policy did not sample in ⟨ ⟩. A segment of an
    agent's session has a line before it, because it repeats what it shares with an earlier one.
    """

    def part(position: int) -> tuple[int, bool]:
        return bisect.bisect(sample.starts, position), bool(sample.loss_mask[position])

    text = ""
    before = 0
    positions = range(sample.prompt_length, len(sample.token_ids))
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
    if score.failure:
        text += f"\nfirst failure: {score.failure}"
    return text


def write(run_dir: Path, file: Path, chosen: Filter) -> int:
    """Write the stored samples of the groups that pass a filter, and return their number. Raises
    ConfigError for a file that exists or has the suffix of another format.
    """
    if file.suffix != ".jsonl":
        raise ConfigError(f"--export {file}: name a file with the suffix .jsonl")
    if file.exists():
        raise ConfigError(f"--export {file}: the file exists; choose another name or delete it")
    number = 0
    with file.open("wb") as target:
        # One by one: a store may hold more samples than memory.
        for line in lines(run_dir, decoder(run_dir), chosen):
            target.write(line)
            number += 1
    return number


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
