"""The progress of a run in the terminal: one live line on a terminal, a plain line every few
seconds elsewhere.

    step 12/60  reward 0.41  held-out 0.56 @10  staleness 1  9.8k tokens/s  learner waits for a
    batch (2 s)

Nothing here blocks or starts a thread. Output is best effort: once the terminal is closed or its
pipe has no reader, the run continues without it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.config.run import RunConfig
from async_rl.monitoring.rates import commonest_failure
from async_rl.monitoring.status import ROLE_ORDER, duration, short_path, wait_of
from async_rl.monitoring.terminal import Terminal
from async_rl.protocol.supervisor import Member

_PLAIN_EVERY_S = 5.0  # a log of an hour then has at most 720 lines
_REDRAW_EVERY_S = 0.1  # heartbeats come more often than a terminal should be redrawn
_LEAST_REPORTED_S = 1.0  # shorter waits change faster than a person can read
_LEAST_PACE_STEPS = 3  # the first steps wait for the first groups and are slower than later steps
_TOLD = ("learner", "gateway", "generator")
_SHOWN = (
    ("reward/mean", "reward {:.2f}"),
    ("eval/pass_at_1", "held-out {:.2f}{}"),
    ("staleness/max_versions", "staleness {:.0f}"),
)
"""The metrics of the line; the second value is the step of the evaluation."""
_BAR_WIDTH = 12  # the line next to it fits a terminal of 80 columns


class Console:
    """The terminal of one run. clock: monotonic seconds; wall: Unix time, as in heartbeats."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._terminal = terminal or Terminal(highlight=False)
        self._clock = clock
        self._wall = wall
        self._live: Live | None = None
        self._drawn_s = -_PLAIN_EVERY_S
        self._plain = ""
        # The first step of the present life of the learner, and its time.
        self._first = (math.inf, 0.0)

    def started(self, tensorboard_url: str, prometheus_url: str) -> None:
        """Print the run's directory and the addresses of TensorBoard and Prometheus."""
        self.note(f"run {self._run_dir.name}  in {short_path(self._run_dir)}")
        if tensorboard_url:
            self.note(f"TensorBoard  {tensorboard_url}")
        if prometheus_url:
            self.note(f"Prometheus  {prometheus_url}")

    def preparing(self, fraction: float, text: str) -> None:
        """Show the progress of preparing the start model."""
        line = f"preparing the model {fraction:4.0%}  {text}"
        self._show(fraction, line, is_due=fraction >= 1.0)

    def progress(
        self,
        step: int,
        metrics: Mapping[str, float],
        members: Iterable[Member],
        *,
        evaluated_step: int | None = None,
    ) -> None:
        """Show the newest metrics and states that are known, after a heartbeat or a step."""
        num_steps = self._config.num_steps
        parts = [f"step {step}/{num_steps}"]
        left_s = self._left_s(step)
        if left_s is not None:
            parts.append(f"about {duration(left_s)} left")
        at_step = "" if evaluated_step is None else f" @{evaluated_step}"
        parts += [form.format(metrics[name], at_step) for name, form in _SHOWN if name in metrics]
        if "throughput/generated_tokens_per_s" in metrics:
            rate = metrics["throughput/generated_tokens_per_s"]
            shown = f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"
            parts.append(f"{shown} tokens/s")
        parts.append(commonest_failure([metrics]))
        # Until the first step every wait is news, however short.
        least_s = _LEAST_REPORTED_S if step > 0 else 0.0
        parts.append(who_waits(members, now_s=self._wall(), least_s=least_s))
        line = "  ".join(filter(None, parts))
        self._show(step / num_steps, line, is_due=False)

    def _left_s(self, step: int) -> float | None:
        """Return the seconds to the last step; None before a few steps, and at the end."""
        # A learner that resumes from a checkpoint starts anew.
        if 0 < step < self._first[0]:
            self._first = (step, self._clock())
        first, first_s = self._first
        left = self._config.num_steps - step
        # A service runs until it is stopped.
        if step - first < _LEAST_PACE_STEPS or left <= 0 or self._config.agent.is_service:
            return None
        return left * (self._clock() - first_s) / (step - first)

    def note(self, text: str) -> None:
        """Print a message above the live line."""
        with self._best_effort():
            self._terminal.print(text, markup=False, soft_wrap=True)

    def end(self, outcome: str, cause: str, step: int) -> None:
        """Print the outcome of the run: `finished`, `stopped` or `failed`, with its root cause."""
        text = f"the run has {outcome} at step {step} of {self._config.num_steps}"
        with self._best_effort():
            if self._live is not None:
                self._live.stop()
                self._live = None
            self._terminal.print(Text(text, style="bold red" if cause else "bold"))
        if cause:
            self.note(cause)

    def _show(self, share: float, line: str, *, is_due: bool) -> None:
        """Redraw the live line of a terminal; elsewhere print a line every few seconds. share: of
        the bar; is_due: whether this is shown in any case.
        """
        is_terminal = self._terminal.is_terminal
        now_s = self._clock()
        every_s = _REDRAW_EVERY_S if is_terminal else _PLAIN_EVERY_S
        # A repeated line would only lengthen the log.
        is_repeated = line == self._plain and not is_terminal
        if is_repeated or (now_s - self._drawn_s < every_s and not is_due):
            return
        self._drawn_s = now_s
        self._plain = line
        if not is_terminal:
            self.note(line)
            return
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        # A line that wraps could not be erased before it is drawn anew.
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(ProgressBar(1.0, share, width=_BAR_WIDTH), Text(line))
        with self._best_effort():
            if self._live is None:
                # Without rich's thread: heartbeats redraw often enough.
                self._live = Live(console=self._terminal, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(grid, refresh=True)

    @contextlib.contextmanager
    def _best_effort(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._terminal.drop()


def who_waits(members: Iterable[Member], *, now_s: float, least_s: float) -> str:
    """Return which processes have not started yet; else the learner, gateway or generator that is
    held back or waits for at least `least_s`, and by what. A process that is held back goes first:
    an outage is the reason why the learner waits for a batch.
    """
    states = ("starting", "blocked")
    ordered = sorted(
        members,
        key=lambda m: (*(m.state != state for state in states), ROLE_ORDER.index(m.role), m.name),
    )
    # A process that waits for resources of a cluster is reported below, with its reason.
    starting = [m.name for m in ordered if m.state == "starting" and not m.waits_for]
    if starting:
        return f"{', '.join(starting)} start{'s' if len(starting) == 1 else ''}"
    for member in ordered:
        # The buffer and the verifiers wait most of the time in a healthy run.
        is_news = member.role in _TOLD or member.state == "starting"
        if is_news and member.waits_for and now_s - member.since_s >= least_s:
            return wait_of(member, now_s)
    return ""
