"""`async-rl rollouts`: shows sampled responses with their verdicts, also while the run continues.

Reads the run's store and the tokenizer of its start model; loads neither torch nor transformers.
"""

import bisect
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from async_rl.core.errors import ConfigError
from async_rl.core.types import Group, Trajectory
from async_rl.launchers.commands.options import OutputDir, Run, console
from async_rl.runs.directory import find_run
from async_rl.runs.export import lines
from async_rl.runs.samples import (
    MOST_GROUPS,
    Decode,
    Sample,
    decoder,
    samples,
    verdicts_of,
    why_none,
)


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
    for number, call in enumerate(sample.calls):
        trained = f"reward {call.reward:g}" if call.end_tokens else "not trained"
        text += f"\ncall {number} {call.role}: {call.num_tokens} tokens, {trained}"
    if score.failure:
        text += f"\nfirst failure: {score.failure}"
    return text
