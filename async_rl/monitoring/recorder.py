"""The one metrics writer of a run: TensorBoard events immediately, and metrics.jsonl with one JSON
object per step, in order.

Input: scalars of a step, from any process, in any order; events of the run.
Output: `<run_dir>/tensorboard/`, `<run_dir>/metrics.jsonl`, `<run_dir>/events.jsonl`.
Rules
- A row is written when it and all rows before it are complete: the learner's part (every step
  after the version that it started from) and the evaluation's (if one is due). Ten minutes after
  its last part an incomplete row is written; a part that arrives later is in TensorBoard only.
- `time_s` is seconds from the start of the run to the row's first part, so a late evaluation does
  not change it; it never decreases from row to row (step 0 has only its evaluation, which may
  arrive after step 1).
- TensorBoard receives at most one learner step in half a second; metrics.jsonl receives all.
- metrics.jsonl only grows, except that a learner that returns to an earlier version cuts off the
  rows after it. Its end alone is read, so neither a resume nor such a return takes longer in a
  longer run.
Not safe for threads.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.errors import DataError, InfrastructureError
from async_rl.core.os import replace_file
from async_rl.core.records import line_number, lines_backwards
from async_rl.monitoring import events
from async_rl.monitoring.event_file import EventFile
from async_rl.protocol.supervisor import ReportMetrics

_LEARNER_PART = "reward/mean"
_SERVICE_PART = "policy/lr"
_EVALUATION_PART = "eval/pass_at_1"
HOLD_S = 600.0
_DRAW_EVERY_S = 0.5
"""A step takes about 10 KB of an event file; so two hours of the quickest run stay below 200 MB.
"""
_LOG = logging.getLogger("async_rl.metrics")

Scalars = Mapping[str, float]


class _RowHead(msgspec.Struct, frozen=True):
    """The part that every row of metrics.jsonl has."""

    step: int
    time_s: float


class _Row(msgspec.Struct):
    """The numbers of one step so far, as saved on disk. Times are seconds since the start of the
    run: of the first part, and of the last one.
    """

    time_s: float
    scalars: dict[str, float | None]
    last_s: float = 0.0


class Recorder:
    """Writes the metrics of one run. clock: seconds; on_row: receives the scalars of each written
    row.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_row: Callable[[int, Scalars], None] = lambda *_: None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._drawn_s = -math.inf
        self._on_row = on_row
        self._run_dir = run_dir
        self._path = run_dir / "metrics.jsonl"
        self._held_path = run_dir / "metrics.held.json"
        self._rows: dict[int, _Row] = {}
        self._resumed = 0
        self._started_s = clock()
        self._next_step = 0 if config.is_evaluated(0) else 1
        newest, end = self._last_row(math.inf)
        if newest is not None:
            # A resumed run continues the times of the run before.
            self._started_s -= newest.time_s
            self._next_step = newest.step + 1
        # Everything is read before anything is opened: a damaged file leaves nothing behind.
        self._recall()
        self._events = EventFile(run_dir / "tensorboard")
        self._path.touch()
        # Half a row of a killed writer is lost.
        os.truncate(self._path, end)

    def record(self, message: ReportMetrics) -> None:
        """Record one part of a step."""
        step = message.step
        scalars = message.scalars
        now_s = self._run_s()
        # Learner steps may come too fast. The last one is what people look at, so it is drawn.
        is_paced = _LEARNER_PART in scalars and step != self._config.num_steps
        if not is_paced or now_s - self._drawn_s >= _DRAW_EVERY_S:
            for name, value in scalars.items():
                self._events.scalar(name, value, step)
            if is_paced:
                self._drawn_s = now_s
        if step >= self._next_step:
            row = self._rows.setdefault(step, _Row(now_s, {}))
            row.scalars.update(scalars)
            row.last_s = now_s
        elif scalars:
            _LOG.warning(
                "%s reported step %d after its row was written; TensorBoard alone has it",
                message.source,
                step,
            )
        self._events.flush()
        self.flush()
        # The incomplete rows survive a killed supervisor.
        replace_file(self._held_path, msgspec.json.encode(self._rows))

    def note(self, kind: str, text: str, step: int) -> None:
        """Record an event of the run: a restart, a silence, a stall, an alarm."""
        events.note(self._run_dir, kind, text, step=step)
        self._events.text(f"run/{kind}", text, step)
        self._events.flush()

    def _run_s(self) -> float:
        """Return the seconds since the start of the run."""
        return self._clock() - self._started_s

    def flush(self) -> None:
        """Write the rows that are complete. `record` calls it; call it from time to time in case
        nothing else is recorded.
        """
        while self._rows:
            step = min(self._rows)
            row = self._rows[step]
            is_late = self._run_s() - row.last_s >= HOLD_S
            # Rows are written in order, so an incomplete one holds back those after it.
            awaited = self._awaited(step) - row.scalars.keys()
            if (awaited or step != self._next_step) and not is_late:
                return
            if awaited:
                missing = ", ".join(sorted(awaited))
                _LOG.warning("step %d is recorded without %s, which did not arrive", step, missing)
            self._write(step)

    def start_from(self, version: int) -> None:
        """Remove the rows after `version`, the learner's start, also from TensorBoard."""
        kept, end = self._last_row(version)
        first = 1 if kept is None else kept.step + 1
        missing = ", ".join(str(n) for n in range(first, version + 1) if n not in self._rows)
        if missing:
            _LOG.warning(
                "%s has no row for step %s: it was not reported, or not on the disk, when the run"
                " ended",
                self._path,
                missing,
            )
        self._resumed = version
        os.truncate(self._path, end)
        self._rows = {step: row for step, row in self._rows.items() if step <= version}
        is_written = kept is not None and kept.step == version
        if version > 0 and self._config.is_evaluated(version) and not is_written:
            # Its evaluation is repeated.
            now_s = self._run_s()
            self._rows.setdefault(version, _Row(now_s, {}, last_s=now_s))
        # A held row of an earlier step is still to be written. Step 0 has no row before its
        # evaluation.
        if self._next_step:
            self._next_step = min([*self._rows, version + 1])
        self._events.restart(version + 1)

    def _last_row(self, version: float) -> tuple[_RowHead | None, int]:
        """Return the last row up to this version, and the offset of the next row."""
        for offset, line in lines_backwards(self._path):
            try:
                row = msgspec.json.decode(line, type=_RowHead)
            except msgspec.DecodeError as error:
                # Not skipped: later rows would hide that numbers of a step are missing.
                raise DataError(
                    f"line {line_number(self._path, offset)} of {self._path} is damaged ({error});"
                    " remove this line, then async-rl resume the run"
                ) from error
            if row.step <= version:
                return row, offset + len(line) + 1
        return None, 0

    def _recall(self) -> None:
        """Continue with the rows that were incomplete when the supervisor was killed."""
        if not self._held_path.exists():
            return
        try:
            saved = msgspec.json.decode(self._held_path.read_bytes(), type=dict[int, _Row])
        except msgspec.DecodeError as error:
            # It is written at every report, too often to wait for the disk each time.
            _LOG.warning(
                "%s is damaged (%s); numbers of steps that were not complete are lost",
                self._held_path,
                error,
            )
            return
        for step, row in saved.items():
            if step >= self._next_step:
                row.last_s = self._run_s()
                self._rows[step] = row

    def close(self) -> None:
        """Write every remaining row and close the files."""
        try:
            for step in sorted(self._rows):
                self._write(step)
        # The run stops; a full disk must not hide the outcome.
        except InfrastructureError as error:
            _LOG.error("%s", error)
        self._events.close()

    def _awaited(self, step: int) -> set[str]:
        awaited = set()
        # The learner does not repeat its part of the version that it starts from.
        if step > self._resumed:
            # The programs of a service have the rewards.
            awaited.add(_SERVICE_PART if self._config.agent.is_service else _LEARNER_PART)
        if self._config.is_evaluated(step):
            awaited.add(_EVALUATION_PART)
        return awaited

    def _write(self, step: int) -> None:
        # A late row must not go back behind the time of the next one.
        time_s = min(row.time_s for row in self._rows.values())
        row = self._rows.pop(step)
        records.append(self._path, [{"step": step, "time_s": round(time_s, 3), **row.scalars}])
        # JSON has no NaN; a row read back from the file has None for it.
        scalars = {name: math.nan if v is None else v for name, v in row.scalars.items()}
        self._on_row(step, scalars)
        self._next_step = step + 1
