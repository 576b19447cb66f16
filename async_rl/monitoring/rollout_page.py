"""One sampled response for people: prompt, response with a colour per token, verdicts, reward and its parts.

Pure: from stored values and the text of each token to something rich can print.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from async_rl.types import Group, Trajectory, Verdict

Colour = Literal["logprob", "version", "advantage"]
LEGEND = {
    "logprob": "probability of the token when it was drawn: green over 90 %, plain over 50 %, yellow over 10 %, red below",
    "version": "a colour per policy version; the version stands where it changes",
    "advantage": "green: reward above the mean of its group, red: below, plain: equal",
}
TOLD = "\u27e8what the policy read and did not write\u27e9"
_VERSION_STYLES = ("cyan", "magenta", "yellow", "green", "blue")
_PROBABILITIES = ((0.9, "green"), (0.5, ""), (0.1, "yellow"), (0.0, "red"))


def page(group: Group, index: int, *, prompt: str, step: int | None, pieces: Sequence[str], colour: Colour) -> RenderableType:
    """Sample `index` of the group. pieces: the text of each response token."""
    sample = group.trajectories[index]
    versions = sample.versions[sample.loss_mask].tolist()
    span = f"versions {min(versions)} to {max(versions)}" if versions else "nothing trained"
    trained = "not trained yet" if step is None else f"step {step}"
    head = Text(f"group {group.group_id}, sample {index}  {group.prompt_id}  {trained}  {group.generator}  {span}", style="bold")
    return Lines(head, Text(prompt.strip(), style="dim"), _response(group, sample, pieces, colour), _verdict(group, sample), Text())


def is_passed(sample: Trajectory) -> bool:
    """Whether every test passed."""
    return bool(sample.score.verdicts) and all(verdict is Verdict.PASS for verdict in sample.score.verdicts)


def _response(group: Group, sample: Trajectory, pieces: Sequence[str], colour: Colour) -> Text:
    text, before, was_written = Text(), None, True
    versions = sample.versions[sample.prompt_length :].tolist()
    logprobs = sample.behavior_logprobs[sample.prompt_length :].tolist()
    above = sample.score.reward - _mean(group)
    written = sample.loss_mask[sample.prompt_length :].tolist()
    for piece, version, logprob, is_written in zip(pieces, versions, logprobs, written, strict=True):
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
            text.append(piece, style=next(style for least, style in _PROBABILITIES if math.exp(logprob) >= least))
        else:
            text.append(piece, style="" if abs(above) < 1e-6 else "green" if above > 0 else "red")
    return text


def _verdict(group: Group, sample: Trajectory) -> Text:
    """Reward with its parts, then the verdicts, equal ones in a row counted."""
    score = sample.score
    counted = [(verdict.value, len(list(same))) for verdict, same in itertools.groupby(score.verdicts)]
    verdicts = ", ".join(name if number == 1 else f"{number} x {name}" for name, number in counted) or "no test was run"
    parts = "".join(f", {name} {value:g}" for name, value in sorted(score.parts.items()))
    cut = ", cut at the length limit" if sample.is_truncated else ""
    text = f"reward {score.reward:g} (mean of its group {_mean(group):.2f}){parts}{cut}; tests: {verdicts}"
    return Text(text, style="green" if is_passed(sample) else "red")


def _mean(group: Group) -> float:
    return sum(sample.score.reward for sample in group.trajectories) / len(group.trajectories)
