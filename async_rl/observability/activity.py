"""The current activity of one process and the time it spent, recorded live for the heartbeat.

    with activity("training"): ...                       busy
    with activity.waiting("batch: 3 of 16 ready"): ...   has no work until something upstream comes
    with activity.blocked("admission: 48 of 48"): ...    could work, but something downstream
                                                         blocks it

Rules, which keep the numbers correct when several asyncio tasks and threads of a process are in
stages at the same time
- Inside one task the innermost block counts; the outer blocks are suspended until it is left.
- `busy_s/<stage>`, `wait_s/<what>` and `blocked_s/<what>` are seconds when at least one task
  was in that stage: a union, never a sum.
- The process is busy while any task is busy, else it waits while any task waits, else it is blocked
  while any task is blocked, else it is idle.  The seconds of the process in these four conditions
  are `busy_s`, `wait_s`, `blocked_s` and `idle_s`; they add up to its age.
- Text after the first colon is a detail for the user; `waits_for` shows it, the counter's name does
  not include it.
- `gauge/<name>` is a value as it is now; every other counter only grows until the process exits.
Every process has one as `context.activity`; its methods are thread-safe.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

GAUGE = "gauge/"
"""Prefix of the counters that are values of the moment."""


class Snapshot(NamedTuple):
    """Content of a heartbeat. waits_for is empty while the process works; since_s is Unix time."""

    state: str
    waits_for: str
    since_s: float
    counters: dict[str, float]


class _Kind(enum.Enum):
    BUSY = "busy_s"
    WAITING = "wait_s"
    BLOCKED = "blocked_s"
    IDLE = "idle_s"


@dataclass(slots=True, eq=False)
class _Frame:
    """One entered block. It is active while open and not suspended by a block inside it. kind,
    label, key: the stage under which it counts; set while it is active.
    """

    entered: tuple[_Kind, str]
    owner: object
    parent: _Frame | None
    kind: _Kind = _Kind.IDLE
    label: str = ""
    key: str = ""
    since: float = 0.0
    num_inner: int = 0
    is_open: bool = True


class Activity:
    """The stages, waits, counters and gauges of one process. clock: monotonic seconds; wall: Unix
    time.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._frame: contextvars.ContextVar[_Frame | None] = contextvars.ContextVar(
            "activity", default=None
        )
        # The active blocks by kind, in order of their activation. The first kind with a block is
        # the condition of the process: work, else a wait for a process upstream, else the process
        # that blocks it.
        self._frames: dict[_Kind, dict[_Frame, None]] = {kind: {} for kind in _Kind}
        # The active blocks of each stage: its seconds are a union, however many blocks there are.
        self._num_active: collections.Counter[str] = collections.Counter()
        # Counters and gauges, and the seconds of each stage and of each condition of the process.
        self._values = collections.defaultdict(float, {kind.value: 0.0 for kind in _Kind})
        self._held_back: dict[str, str] = {}
        self._rest_state = "starting"
        self._rest_since = clock()
        self._counted_until = self._rest_since
        self._kind = _Kind.IDLE

    def __call__(self, stage: str) -> AbstractContextManager[None]:
        """Count the block as work on `stage`."""
        return self._inside(_Kind.BUSY, stage)

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Count the block as a wait for something upstream."""
        return self._inside(_Kind.WAITING, reason)

    def blocked(self, reason: str) -> AbstractContextManager[None]:
        """Count the block as blocked by something downstream."""
        return self._inside(_Kind.BLOCKED, reason)

    @contextlib.contextmanager
    def held_back(self, stage: str, *, by: str) -> Iterator[None]:
        """While the block lasts, blocks of work on `stage`, whichever task is in them, count as
        held back by `by`.
        """
        self._recount(stage, by)
        try:
            yield
        finally:
            self._recount(stage, "")

    def _recount(self, stage: str, by: str) -> None:
        with self._changing() as now:
            frames = [
                frame
                for active in self._frames.values()
                for frame in active
                if frame.entered == (_Kind.BUSY, stage)
            ]
            for frame in frames:
                self._leave(frame)
            self._held_back[stage] = by
            for frame in frames:
                self._enter(frame, now)

    def rest(self, state: str) -> None:
        """Set the state of the process while no block is entered: `starting` at first, then for
        example `serving`.
        """
        with self._lock:
            self._rest_state = state
            self._rest_since = self._clock()

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a cumulative counter."""
        with self._lock:
            self._values[name] += amount

    def gauge(self, name: str, value: float) -> None:
        """Set a current value; a snapshot has it as `gauge/<name>`."""
        with self._lock:
            self._values[GAUGE + name] = value

    def snapshot(self) -> Snapshot:
        """Return the present state; seconds of blocks that are still open are counted up to now."""
        with self._changing() as now:
            frame = self._shown()
            state = self._rest_state
            waits_for = ""
            since = self._rest_since
            if frame is not None:
                since = frame.since
                state = frame.label
                if frame.kind is not _Kind.BUSY:
                    state = "waiting" if frame.kind is _Kind.WAITING else "blocked"
                    waits_for = frame.label
            return Snapshot(state, waits_for, self._wall() - (now - since), dict(self._values))

    @contextlib.contextmanager
    def _inside(self, kind: _Kind, label: str) -> Iterator[None]:
        outer = self._frame.get()
        # A task that outlives the block that started it still has that block as its
        # context.
        while outer is not None and not outer.is_open:
            outer = outer.parent
        frame = _Frame((kind, label), _owner(outer), outer)
        # A block entered by a task that was only started inside another block does not suspend it:
        # both continue side by side.
        parent = outer if outer is not None and outer.owner is frame.owner else None
        self._frame.set(frame)
        with self._changing() as now:
            if parent is not None:
                parent.num_inner += 1
                if parent.num_inner == 1:
                    self._leave(parent)
            self._enter(frame, now)
        try:
            yield
        finally:
            with self._changing() as now:
                if frame.num_inner == 0:
                    self._leave(frame)
                frame.is_open = False
                if parent is not None:
                    parent.num_inner -= 1
                    if parent.num_inner == 0 and parent.is_open:
                        self._enter(parent, now)
            # An async generator may be closed in another context, where this frame is not the
            # current one.
            if self._frame.get() is frame:
                self._frame.set(outer)

    def _enter(self, frame: _Frame, now: float) -> None:
        kind, label = frame.entered
        by = self._held_back.get(label, "") if kind is _Kind.BUSY else ""
        frame.kind = _Kind.BLOCKED if by else kind
        frame.label = by or label
        # Details after a colon are for people; a counter for each would fill every heartbeat.
        frame.key = f"{frame.kind.value}/{frame.label.split(':', 1)[0].strip()}"
        frame.since = now
        self._frames[frame.kind][frame] = None
        self._num_active[frame.key] += 1

    def _leave(self, frame: _Frame) -> None:
        del self._frames[frame.kind][frame]
        self._num_active[frame.key] -= 1

    def _shown(self) -> _Frame | None:
        """Return the block that describes the process. Among the blocks of its condition, a block
        that holds all work back comes first, then a block with a detail, then the oldest one.
        """
        reasons = self._held_back.values()
        return min(
            self._frames[self._kind],
            key=lambda frame: (frame.label not in reasons, ":" not in frame.label),
            default=None,
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[float]:
        """Count the seconds up to now, the time that this yields, and update the condition of the
        process after blocks were entered or left.
        """
        with self._lock:
            now = self._clock()
            passed = now - self._counted_until
            self._counted_until = now
            self._values[self._kind.value] += passed
            for key, number in self._num_active.items():
                self._values[key] += passed * (number > 0)
            yield now
            kind = next((kind for kind, frames in self._frames.items() if frames), _Kind.IDLE)
            if kind is not self._kind and kind is _Kind.IDLE:
                self._rest_since = now
            self._kind = kind


def _owner(outer: _Frame | None) -> object:
    """Return the owner of a new block: the asyncio task, or, in a thread that a block handed work
    to (`to_thread`), that block's owner.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        return task
    if outer is not None:
        return outer.owner
    return threading.get_ident()
