"""The table that `async-rl replay` prints: each step next to the recorded step, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.training.checkpoints import published_checksums
from async_rl.training.replays import Replayed

_COLUMNS = (
    ("loss", "loss/policy"),
    ("grad norm", "policy/grad_norm"),
    ("entropy", "policy/entropy"),
)
_SAMPLE_SIZE = "policy/effective_sample_size"
_WIDTH = 26  # two spaces, and -1.234e-05 -> -1.234e-05
_BELIEVABLE = 0.5
"""Effective share of samples below which a curve says little: half of the data no longer count."""


class Comparison:
    """Compares replayed steps with recorded ones. recorded: the run's metrics by step."""

    def __init__(
        self, run_dir: Path, recorded: Mapping[int, Mapping[str, float]], *, is_changed: bool
    ) -> None:
        self._checksums = published_checksums(run_dir)
        self._recorded = recorded
        self._is_changed = is_changed
        self._seconds = 0.0
        self._num_steps = 0
        self._equal: list[int] = []
        self._different: list[int] = []
        self._sizes: dict[int, float] = {}

    def header(self) -> str:
        """Return the titles of the columns."""
        titles = "".join(f"{title:>{_WIDTH}}" for title, _ in _COLUMNS)
        return f"{'step':>6}{titles}{'sample size':>14}  weights"

    def row(self, line: bytes) -> str:
        """Take in one JSON line of the replay and return its row: recorded -> replayed."""
        replayed = msgspec.json.decode(line, type=Replayed)
        step = replayed.step
        recorded = self._recorded.get(step, {})
        cells = "".join(
            f"{_change(recorded.get(name), replayed.metrics.get(name)):>{_WIDTH}}"
            for _, name in _COLUMNS
        )
        size = replayed.metrics.get(_SAMPLE_SIZE, math.nan)
        self._sizes[step] = size
        self._seconds += replayed.seconds
        self._num_steps += 1
        return f"{step:>6}{cells}{size:>14.3f}  {self._weights(replayed)}"

    def _weights(self, replayed: Replayed) -> str:
        # A run writes checksums of published versions only (weights.push_every_steps).
        checksum = self._checksums.get(replayed.step)
        if checksum is None:
            return "not recorded"
        if checksum == replayed.checksum:
            self._equal.append(replayed.step)
            return "equal"
        self._different.append(replayed.step)
        return "differ"

    @property
    def is_broken(self) -> bool:
        """Return whether a replay without changes did not give the weights of the run."""
        return bool(self._different) and not self._is_changed

    def verdict(self) -> str:
        """Return the sentences below the table."""
        lines = [f"{self._num_steps} steps in {self._seconds:.1f} s"]
        num_known = len(self._equal) + len(self._different)
        if self._is_changed:
            lines.append(self._belief())
        elif self._different:
            lines.append(
                f"the weights differ from the run's from step {self._different[0]} on: other"
                " code, hardware, number of threads or ranks, or settings that changed at a resume"
                " (config.<n>.yaml)"
            )
        elif num_known:
            lines.append(f"the weights equal the run's at all {num_known} compared steps")
        else:
            lines.append(
                "the run has no checksums of these versions (versions.jsonl), so the weights were"
                " not compared"
            )
        return "\n".join(lines)

    def _belief(self) -> str:
        """Say how far curves of other settings on the same data may be believed."""
        data = (
            "the responses come from the recorded policy, and the replayed policy differs from it"
            " more with every step"
        )
        low = [step for step, size in self._sizes.items() if size < _BELIEVABLE]
        if low:
            return (
                f"{data}: from step {low[0]} on fewer than half of the samples count (sample size"
                f" {self._sizes[low[0]]:.2f}), so later values say little about a run with these"
                " settings"
            )
        smallest = min(self._sizes.values(), default=math.nan)
        return (
            f"{data}; the smallest effective sample size is {smallest:.2f} of 1, so the values"
            " describe how these settings learn from this data, not the responses that they would"
            " have led to"
        )


def _change(old: float | None, new: float | None) -> str:
    if new is None:
        return "-"
    # One number where both agree, so that differences are seen.
    if old is None or old == new:
        return f"{new:.4g}"
    return f"{old:.4g} -> {new:.4g}"
