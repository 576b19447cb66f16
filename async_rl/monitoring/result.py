"""The result of a run in a few lines, shown when it ends and by `async-rl status` afterwards.

Reads metrics.jsonl; `saved` are the steps of its checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from async_rl.core.frozen import frozen
from async_rl.monitoring.status import duration

_NUM_AVERAGED = 5  # rewards of single steps differ by more than a run's progress in a few steps


class _Row(msgspec.Struct, frozen=True):
    """The numbers of one step that a result is made of."""

    step: int
    time_s: float
    pass_at_1: float | None = msgspec.field(name="eval/pass_at_1", default=None)
    pass_at_1_error: float | None = msgspec.field(name="eval/pass_at_1_error", default=None)
    reward: float | None = msgspec.field(name="reward/mean", default=None)


@frozen
class _Evaluation:
    step: int
    pass_at_1: float
    error: float | None

    def __str__(self) -> str:
        interval = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.pass_at_1:.3f}{interval} at step {self.step}"


def result_lines(run_dir: Path, saved: Sequence[int]) -> list[str]:
    """Return the result of a run and the commands that continue from here; empty if no step was
    reported. saved: steps of its checkpoints, in order.
    """
    rows = _rows(run_dir / "metrics.jsonl")
    if not rows:
        return []
    evaluations = [
        _Evaluation(step=row.step, pass_at_1=row.pass_at_1, error=row.pass_at_1_error)
        for row in rows
        if row.pass_at_1 is not None
    ]
    rewards = [row.reward for row in rows if row.reward is not None]
    lines = [
        _fact("held-out pass@1", _held_out(evaluations)),
        _fact("reward", _reward(rewards)),
        _fact("time", duration(max(row.time_s for row in rows))),
        _fact("checkpoints", _checkpoints(evaluations, saved)),
        _fact("numbers", short_path(run_dir / "metrics.jsonl")),
        _fact("look at it", f"async-rl view {run_dir.name}; async-rl rollouts {run_dir.name}"),
    ]
    if saved:
        lines.append(
            _fact(
                "continue",
                f"async-rl resume {run_dir.name} num_steps={2 * saved[-1]}; async-rl eval"
                f" {run_dir.name}; async-rl export {run_dir.name} model/",
            )
        )
    return [line for line in lines if line]


def short_path(path: Path) -> str:
    """Return the path relative to the working directory, if it is below it."""
    # A path that a person can copy, as short as possible.
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _fact(name: str, text: str) -> str:
    return f"{name:16}{text}" if text else ""


def _held_out(evaluations: Sequence[_Evaluation]) -> str:
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    if first == last:
        return str(last)
    best = max(evaluations, key=lambda evaluation: evaluation.pass_at_1)
    text = f"{first}, {last}"
    return text if best in (first, last) else f"{text}, best {best}"


def _reward(rewards: Sequence[float]) -> str:
    if not rewards:
        return ""
    number = min(_NUM_AVERAGED, len(rewards))
    first, last = sum(rewards[:number]) / number, sum(rewards[-number:]) / number
    return f"{first:.3f} to {last:.3f} (means of the first and the last {number} steps)"


def _checkpoints(evaluations: Sequence[_Evaluation], saved: Sequence[int]) -> str:
    if not saved:
        return "none: the run ended before its first checkpoint"
    text = f"steps {', '.join(map(str, saved))}"
    evaluated = [evaluation for evaluation in evaluations if evaluation.step in saved]
    if evaluated:
        best = max(evaluated, key=lambda evaluation: evaluation.pass_at_1)
        text += f"; the best of them by held-out pass@1 is step {best.step}"
    return text


def _rows(path: Path) -> list[_Row]:
    """Return the rows in order of their steps; the last one of a step that was repeated."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows: dict[int, _Row] = {}
    decoder = msgspec.json.Decoder(_Row)
    for line in lines:
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError:
            continue  # a killed writer may leave half a line
        rows[row.step] = row
    return [rows[step] for step in sorted(rows)]
