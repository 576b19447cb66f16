"""One sampled response for the terminal: prompt, coloured tokens, verdicts, reward and its parts.

Pure: from stored values and the text of each token to an object that rich prints.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence

import numpy as np
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from async_rl.core.types import FloatArray, Group, Trajectory, Verdict


class Colour(enum.StrEnum):
    """The meaning of a token's colour."""

    LOGPROB = "logprob"
    VERSION = "version"
    ADVANTAGE = "advantage"


LEGEND = {
    Colour.LOGPROB: (
        "probability of the token when it was sampled: green over 90 %, plain over 50 %, yellow"
        " over 10 %, red below"
    ),
    Colour.VERSION: "one colour per policy version; a changed version is printed before the token",
    Colour.ADVANTAGE: (
        "green: better than expected, red: worse, bold: far more than is usual in the group;"
        " per token with a critic, otherwise per sample: its reward minus the mean of its group"
    ),
}
NOT_SAMPLED = "\u27e8text that the policy did not sample\u27e9"
# 13 % of normally distributed values are beyond it.
_MUCH = 1.5  # root mean squares of the group's advantages
_ZERO = 1e-6
_VERSION_STYLES = ("cyan", "magenta", "yellow", "green", "blue")
_PROBABILITIES = ((0.9, "green"), (0.5, ""), (0.1, "yellow"), (0.0, "red"))


def page(
    group: Group,
    index: int,
    *,
    prompt: str,
    step: int | None,
    pieces: Sequence[str],
    colour: Colour,
    advantages: FloatArray | None = None,
) -> RenderableType:
    """Return sample `index` of the group. pieces: the text of each response token; advantages: of
    all response tokens of the group.
    """
    sample = group.trajectories[index]
    versions = sample.versions[sample.loss_mask].tolist()
    span = f"versions {min(versions)} to {max(versions)}" if versions else "nothing trained"
    trained = "not trained yet" if step is None else f"step {step}"
    title = f"group {group.group_id}, sample {index}  {group.prompt_id}  {trained}"
    return Lines(
        Text(f"{title}  {group.generator}  {span}", style="bold"),
        Text(prompt.strip(), style="dim"),
        _response(sample, pieces, colour, token_advantages(group, index, advantages)),
        _verdict(group, sample),
        Text(),
    )


def is_passed(sample: Trajectory) -> bool:
    """Return whether there are tests and every one passed."""
    verdicts = sample.score.verdicts
    # A sample without tests has not passed any.
    return bool(verdicts) and all(verdict is Verdict.PASS for verdict in verdicts)


def _response(
    sample: Trajectory, pieces: Sequence[str], colour: Colour, advantages: Sequence[float]
) -> Text:
    text = Text()
    start = sample.prompt_length
    tokens = zip(
        pieces,
        sample.versions[start:].tolist(),
        sample.behavior_logprobs[start:].tolist(),
        advantages,
        sample.loss_mask[start:].tolist(),
        strict=True,
    )
    version_before = None
    was_sampled = True
    positions = iter(range(start, len(sample.token_ids)))
    for piece, version, logprob, advantage, is_sampled in tokens:
        # A segment of an agent's session repeats what it shares with an earlier one.
        if next(positions) in sample.starts:
            text.append("\n[segment]\n", style="dim")
        if is_sampled != was_sampled:
            text.append("\u27e9" if is_sampled else "\u27e8", style="dim")
            was_sampled = is_sampled
        if not is_sampled:
            text.append(piece, style="dim italic")
            continue
        if colour == Colour.VERSION:
            if version != version_before:
                text.append(f"[{version}]", style="dim")
                version_before = version
            style = _VERSION_STYLES[version % len(_VERSION_STYLES)]
        elif colour == Colour.LOGPROB:
            probability = math.exp(logprob)
            style = next(style for least, style in _PROBABILITIES if probability >= least)
        else:
            style = _advantage_style(advantage)
        text.append(piece, style=style)
    return text


def _advantage_style(advantage: float) -> str:
    if abs(advantage) < _ZERO:
        return ""
    style = "green" if advantage > 0 else "red"
    return f"bold {style}" if abs(advantage) > _MUCH else style


def token_advantages(group: Group, index: int, advantages: FloatArray | None) -> list[float]:
    """Return the advantage of each response token of the sample, in units of the group's root mean
    square; without stored advantages from the sample's reward.
    """
    lengths = [sample.response_length for sample in group.trajectories]
    if advantages is None or len(advantages) != sum(lengths):
        rewards = [sample.score.reward for sample in group.trajectories]
        spread = float(np.std(rewards)) or 1.0
        return [(rewards[index] - _mean(group)) / spread] * lengths[index]
    start = sum(lengths[:index])
    # Equal advantages of 0 have no scale.
    scale = float(np.sqrt(np.mean(advantages**2))) or 1.0
    values: list[float] = (advantages[start : start + lengths[index]] / scale).tolist()
    return values


def _verdict(group: Group, sample: Trajectory) -> Text:
    """Return the reward with its parts and the verdicts, with equal neighbours counted."""
    score = sample.score
    verdicts = []
    for verdict, same in itertools.groupby(score.verdicts):
        number = len(list(same))
        verdicts.append(verdict.value if number == 1 else f"{number} x {verdict.value}")
    text = f"reward {score.reward:g} (mean of its group {_mean(group):.2f})"
    for name, value in sorted(score.parts.items()):
        text += f", {name} {value:g}"
    num_turns, num_segments = turns_and_segments(sample)
    if num_turns > 1:
        text += f", {num_turns} turns"
    if num_segments > 1:
        text += f" in {num_segments} segments"
    if sample.is_truncated:
        text += ", cut at the length limit"
    # Functions alone run no test, and only programs compile.
    if "compiles" in score.parts or not score.parts:
        text += f"; tests: {', '.join(verdicts) or 'no test was run'}"
    elif "tests_passed" in score.parts:
        text += f"; the answer is {'right' if is_passed(sample) else 'wrong'}"
    if score.failure:
        text += f"\nfirst failure: {score.failure}"
    return Text(text, style="green" if is_passed(sample) else "red")


def turns_and_segments(sample: Trajectory) -> tuple[int, int]:
    """Return the answers of the policy in a sample, and the segments that they are in."""
    mask = sample.loss_mask.astype(int)
    num_turns = int((np.diff(mask, prepend=0) > 0).sum())
    continues_prompt = not sample.starts or sample.starts[0] > sample.prompt_length
    return num_turns, len(sample.starts) + continues_prompt


def _mean(group: Group) -> float:
    return sum(sample.score.reward for sample in group.trajectories) / len(group.trajectories)
