"""One sampled response for the terminal: prompt, coloured tokens, verdicts, reward and its parts.

Pure: from stored values and the text of each token to an object that rich prints.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

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
_PROBABILITIES = (0.1, 0.5, 0.9)  # a token below the first is a surprise
# In root mean squares of the group's advantages: 13 % of normally distributed values are beyond
# 1.5, and 1e-6 is zero after rounding.
_ADVANTAGES = (-1.5, -0.5, -1e-6, 1e-6, 0.5, 1.5)
_PROBABILITY_STYLES = ("red", "yellow", "", "green")
_ADVANTAGE_STYLES = ("bold red", "red", "red", "", "green", "green", "bold green")
_VERSION_STYLES = ("cyan", "magenta", "yellow", "green", "blue")


class Token(NamedTuple):
    """A response token and its values. text: what it adds to the response. logprob, version: of the
    policy that sampled it. advantage: in root mean squares of its group's advantages.
    """

    text: str
    token_id: int
    is_sampled: bool
    logprob: float
    version: int
    advantage: float

    @property
    def probability(self) -> float:
        """The probability of the token when it was sampled."""
        return math.exp(self.logprob)

    @property
    def probability_grade(self) -> int:
        """The class of its probability, 0 to 3."""
        return bisect.bisect(_PROBABILITIES, self.probability)

    @property
    def advantage_grade(self) -> int:
        """The class of its advantage, 0 to 6; 3 is none."""
        return bisect.bisect(_ADVANTAGES, self.advantage)

    def style(self, colour: Colour) -> str:
        """Return the style of its text in a terminal."""
        match colour:
            case Colour.VERSION:
                return _VERSION_STYLES[self.version % len(_VERSION_STYLES)]
            case Colour.LOGPROB:
                return _PROBABILITY_STYLES[self.probability_grade]
            case Colour.ADVANTAGE:
                return _ADVANTAGE_STYLES[self.advantage_grade]


def tokens_of(
    group: Group, index: int, pieces: Sequence[str], advantages: FloatArray | None
) -> list[Token]:
    """Return the response tokens of a sample. pieces: the text of each; advantages: float32 of all
    response tokens of the group, if a step with a critic stored them.
    """
    sample = group.trajectories[index]
    columns = (sample.token_ids, sample.loss_mask, sample.behavior_logprobs, sample.versions)
    values = [column[sample.prompt_length :].tolist() for column in columns]
    own = _token_advantages(group, index, advantages)
    return [Token(*row) for row in zip(pieces, *values, own, strict=True)]


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
    tokens = tokens_of(group, index, pieces, advantages)
    versions = [token.version for token in tokens if token.is_sampled]
    span = f"versions {min(versions)} to {max(versions)}" if versions else "nothing trained"
    trained = "not trained yet" if step is None else f"step {step}"
    title = f"group {group.group_id}, sample {index}  {group.prompt_id}  {trained}"
    return Lines(
        Text(f"{title}  {group.generator}  {span}", style="bold"),
        Text(prompt.strip(), style="dim"),
        _response(sample, tokens, colour),
        _verdict(group, sample),
        Text(),
    )


def is_passed(sample: Trajectory) -> bool:
    """Return whether there are tests and every one passed."""
    verdicts = sample.score.verdicts
    # A sample without tests has not passed any.
    return bool(verdicts) and all(verdict is Verdict.PASS for verdict in verdicts)


def _response(sample: Trajectory, tokens: Sequence[Token], colour: Colour) -> Text:
    text = Text()
    version_before = None
    was_sampled = True
    for position, token in enumerate(tokens, sample.prompt_length):
        # A segment of an agent's session repeats what it shares with an earlier one.
        if position in sample.starts:
            text.append("\n[segment]\n", style="dim")
        if token.is_sampled != was_sampled:
            text.append("\u27e9" if token.is_sampled else "\u27e8", style="dim")
            was_sampled = token.is_sampled
        if not token.is_sampled:
            text.append(token.text, style="dim italic")
            continue
        if colour is Colour.VERSION and token.version != version_before:
            text.append(f"[{token.version}]", style="dim")
            version_before = token.version
        text.append(token.text, style=token.style(colour))
    return text


def _token_advantages(group: Group, index: int, advantages: FloatArray | None) -> list[float]:
    """Return the advantage of each response token of the sample, in units of the group's root mean
    square; without stored advantages from the sample's reward.
    """
    lengths = [sample.response_length for sample in group.trajectories]
    if advantages is None or len(advantages) != sum(lengths):
        rewards = [sample.score.reward for sample in group.trajectories]
        # Equal rewards have no spread.
        spread = float(np.std(rewards)) or 1.0
        return [(rewards[index] - _mean(group)) / spread] * lengths[index]
    start = sum(lengths[:index])
    # Equal advantages of 0 have no scale.
    scale = float(np.sqrt(np.mean(advantages**2))) or 1.0
    values: list[float] = (advantages[start : start + lengths[index]] / scale).tolist()
    return values


def verdicts_of(sample: Trajectory) -> list[tuple[str, int]]:
    """Return (verdict, number of equal neighbours) of the tests."""
    runs = itertools.groupby(sample.score.verdicts)
    return [(verdict.value, len(list(same))) for verdict, same in runs]


def _verdict(group: Group, sample: Trajectory) -> Text:
    """Return the reward with its parts and the verdicts, with equal neighbours counted."""
    score = sample.score
    verdicts = [
        verdict if number == 1 else f"{number} x {verdict}"
        for verdict, number in verdicts_of(sample)
    ]
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
    # A first segment that follows the prompt has no entry in `starts`.
    continues_prompt = not sample.starts or sample.starts[0] > sample.prompt_length
    return num_turns, len(sample.starts) + continues_prompt


def _mean(group: Group) -> float:
    return sum(sample.score.reward for sample in group.trajectories) / len(group.trajectories)
