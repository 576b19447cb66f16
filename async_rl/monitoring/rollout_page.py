"""One sampled response for people: prompt, response with a colour per token, verdicts, reward and
its parts.

Pure: from stored values and the text of each token to something rich can print.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from async_rl.core.types import FloatArray, Group, Trajectory, Verdict

Colour = Literal["logprob", "version", "advantage"]
LEGEND = {
    "logprob": (
        "probability of the token when it was drawn: green over 90 %, plain over 50 %, yellow over"
        " 10 %, red below"
    ),
    "version": "a colour per policy version; the version stands where it changes",
    "advantage": (
        "green: better than expected, red: worse, bold: by far more than is usual in the group; of"
        " each token with a critic, else of the whole sample: its reward against the mean of its"
        " group"
    ),
}
TOLD = "\u27e8what the policy read and did not write\u27e9"
_MUCH = 1.5
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
    """Sample `index` of the group. pieces: the text of each response token; advantages: of all
    response tokens of the group.
    """
    sample = group.trajectories[index]
    versions = sample.versions[sample.loss_mask].tolist()
    span = f"versions {min(versions)} to {max(versions)}" if versions else "nothing trained"
    trained = "not trained yet" if step is None else f"step {step}"
    head = Text(
        f"group {group.group_id}, sample {index}  {group.prompt_id}  {trained}  {group.generator} "
        f" {span}",
        style="bold",
    )
    return Lines(
        head,
        Text(prompt.strip(), style="dim"),
        _response(group, index, pieces, colour, advantages),
        _verdict(group, sample),
        Text(),
    )


def is_passed(sample: Trajectory) -> bool:
    """Whether every test passed."""
    return bool(sample.score.verdicts) and all(
        verdict is Verdict.PASS for verdict in sample.score.verdicts
    )


def _response(
    group: Group, index: int, pieces: Sequence[str], colour: Colour, advantages: FloatArray | None
) -> Text:
    sample, text, before, was_written = group.trajectories[index], Text(), None, True
    versions = sample.versions[sample.prompt_length :].tolist()
    logprobs = sample.behavior_logprobs[sample.prompt_length :].tolist()
    values = _advantages(group, index, advantages)
    written = sample.loss_mask[sample.prompt_length :].tolist()
    for piece, version, logprob, value, is_written in zip(
        pieces, versions, logprobs, values, written, strict=True
    ):
        if is_written != was_written:
            text.append("\u27e9" if is_written else "\u27e8", style="dim")
            was_written = is_written
        if not is_written:
            text.append(piece, style="dim italic")
        elif colour == "version":
            if version != before:
                text.append(f"[{version}]", style="dim")
            text.append(piece, style=_VERSION_STYLES[version % len(_VERSION_STYLES)])
            before = version
        elif colour == "logprob":
            text.append(
                piece,
                style=next(style for least, style in _PROBABILITIES if math.exp(logprob) >= least),
            )
        else:
            bold = "bold " if abs(value) > _MUCH else ""
            text.append(
                piece,
                style="" if abs(value) < 1e-6 else f"{bold}green" if value > 0 else f"{bold}red",
            )
    return text


def _advantages(group: Group, index: int, found: FloatArray | None) -> list[float]:
    """Of each response token of the sample, in units of their root mean square in the group; from
    its reward if none are found.
    """
    lengths = [sample.response_length for sample in group.trajectories]
    if found is None:
        rewards = [sample.score.reward for sample in group.trajectories]
        return [(rewards[index] - _mean(group)) / (float(np.std(rewards)) or 1.0)] * lengths[index]
    start = sum(lengths[:index])
    values: list[float] = (
        found[start : start + lengths[index]] / (float(np.sqrt(np.mean(found**2))) or 1.0)
    ).tolist()
    return values


def _verdict(group: Group, sample: Trajectory) -> Text:
    """Reward with its parts, then the verdicts, equal ones in a row counted."""
    score = sample.score
    counted = [
        (verdict.value, len(list(same))) for verdict, same in itertools.groupby(score.verdicts)
    ]
    verdicts = (
        ", ".join(name if number == 1 else f"{number} x {name}" for name, number in counted)
        or "no test was run"
    )
    parts = "".join(f", {name} {value:g}" for name, value in sorted(score.parts.items()))
    cut = ", cut at the length limit" if sample.is_truncated else ""
    text = (
        f"reward {score.reward:g} (mean of its group {_mean(group):.2f}){parts}{cut}; tests:"
        f" {verdicts}"
    )
    return Text(text, style="green" if is_passed(sample) else "red")


def _mean(group: Group) -> float:
    return sum(sample.score.reward for sample in group.trajectories) / len(group.trajectories)
