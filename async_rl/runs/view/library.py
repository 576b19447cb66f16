"""The runs that the web view shows: their settings, metrics and state, each read when its file
changed and remembered otherwise.
"""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.composition.schema import flatten
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.protocol.supervisor import StatusReply
from async_rl.runs.comparison import NOT_OBJECTIVE
from async_rl.runs.control import ask_status
from async_rl.runs.directory import all_runs
from async_rl.runs.metrics import Curves
from async_rl.runs.samples import Decode, decoder
from async_rl.runs.status import Result, RunState, result_of, state_of

# The model and the objective distinguish runs for a reader.
_LABELS = ("model.path", "algorithm.advantage", "algorithm.policy_loss")
_ANSWER_S = 1.5
"""A run that does not answer in this time is shown from its files: a page must not wait for it."""


@frozen
class Summary:
    """A run in one line. settings: those that distinguish runs for a reader."""

    name: str
    state: RunState
    cause: str
    step: int
    num_steps: int
    settings: str
    result: Result

    @property
    def held_out(self) -> str:
        """The newest held-out result with its interval."""
        return self.result.evaluations[-1].text if self.result.evaluations else "–"

    @property
    def best(self) -> str:
        """The best held-out result with its step."""
        best = self.result.best()
        return "–" if best is None else f"{best.pass_at_1:.3f} at {best.step}"

    @property
    def reward(self) -> float | None:
        """The newest mean reward."""
        return self.result.rewards[-1] if self.result.rewards else None


class RunView:
    """One run, until its configuration is written again. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.curves = Curves(path)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run's config.yaml by its path; empty if it cannot be read."""
        try:
            text = (self.path / "config.yaml").read_bytes()
            return dict(flatten(msgspec.yaml.decode(text, type=dict[str, Any])))
        except (OSError, msgspec.DecodeError):
            return {}

    @property
    def is_live(self) -> bool:
        """Return whether its processes run or its job waits."""
        return state_of(self.path)[0].is_live

    def status(self) -> StatusReply | None:
        """Return the live run's answer; None if it does not answer in time or has exited."""
        return ask_status(self.path, timeout_s=_ANSWER_S) if self.is_live else None

    def summary(self) -> Summary:
        """Return the run in one line."""
        self.curves.refresh()
        state, cause = state_of(self.path)
        values = [self.settings.get(name) for name in _LABELS]
        return Summary(
            name=self.name,
            state=state,
            cause=cause,
            step=int(max(self.curves.points("step")[1], default=0)),
            num_steps=int(self.settings.get("num_steps", 0)),
            settings=", ".join(str(value) for value in values if value),
            result=result_of(self.curves),
        )

    @functools.cached_property
    def decode(self) -> Decode:
        """Return its tokenizer's function from token ids to text. Raises ConfigError."""
        return decoder(self.path)


class Library:
    """The runs of a directory, the newest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs: dict[tuple[Path, int], RunView] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[RunView]:
        """Return all runs."""
        # Pages are built in threads; two of them must not make two readers of one run.
        with self._lock:
            paths = all_runs(self.directory)
            # A run that was resumed has other settings, and a directory of the same name may be
            # another run. A page of a thousand runs reads only what changed.
            keys = [(path, (path / "config.yaml").stat().st_mtime_ns) for path in paths]
            self._runs = {key: self._runs.get(key) or RunView(key[0]) for key in keys}
            return list(self._runs.values())

    def run(self, name: str) -> RunView:
        """Return a run by its name. Raises ConfigError if the directory has none of this name."""
        for run in self.runs():
            if run.name == name:
                return run
        raise ConfigError(f"{self.directory} has no run {name}")


def differences(shown: Sequence[RunView]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value of each run."""
    names = dict.fromkeys(name for run in shown for name in run.settings)
    rows = {name: [str(run.settings.get(name, "–")) for run in shown] for name in names}
    return {
        name: values
        for name, values in rows.items()
        if len(set(values)) > 1 and name not in NOT_OBJECTIVE
    }
