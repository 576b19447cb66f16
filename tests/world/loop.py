"""An event loop in virtual time, with processes that can be killed, stopped and continued.

Nothing waits: when no callback is ready, the clock goes to the next timer. A process is a value of
a context variable, so each callback belongs to the process whose code created it. The callbacks of
a killed process never run again, not even a `finally`; the callbacks of a stopped one wait.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import heapq
import itertools
import selectors
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Self

CALLBACK_S = 1e-6
MOST_CALLBACKS = 100_000
"""At one moment of virtual time; more means that the code loops without waiting."""


class Stuck(AssertionError):
    """Nothing can happen any more, or everything happens at one moment."""


@dataclass(eq=False)
class Process:
    """One life of a process. held: callbacks that wait because it is stopped."""

    name: str
    pid: int
    is_dead: bool = False
    is_stopped: bool = False
    clock_offset_s: float = 0.0
    signals: dict[int, Callable[[], object]] = field(default_factory=dict)
    held: collections.deque[asyncio.Handle] = field(default_factory=collections.deque)
    on_death: list[Callable[[], object]] = field(default_factory=list)


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current() -> Process:
    """Return the process whose code runs."""
    process = CURRENT.get()
    assert process is not None, "this belongs to a process"
    return process


class _NoFiles(selectors.BaseSelector):
    """The loop's own pipe is registered and never read."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


_NUMBERS = itertools.count()


class _Numbered:
    """Sets of futures have an order that does not depend on memory addresses."""

    number: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        future = super().__new__(cls)
        future.number = next(_NUMBERS)
        return future

    def __hash__(self) -> int:
        return self.number


class NumberedFuture(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    """A future of this loop."""


class NumberedTask(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    """A task of this loop."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in order of their time. thread_s: the duration of work in a thread."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        self._now_s = 1000.0
        self._thread_s = thread_s
        self.num_callbacks = 0
        self._num_now = 0
        self.is_over = False
        # A coroutine that is collected would run its `finally` blocks.
        self._kept: list[asyncio.Task[Any]] = []
        super().__init__(_NoFiles())
        self.set_task_factory(
            lambda loop, coroutine, **kinds: NumberedTask(coroutine, loop=loop, **kinds)
        )

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        if self.is_over:
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon(callback, *args, context=context)

    def start(self, process: Process, work: Any, *, name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine as code of a process."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        self._kept.append(self.create_task(work, name=name or process.name, context=context))
        return self._kept[-1]

    def call_next(self, callback: Callable[[], object]) -> None:
        """Run the callback before all that are ready."""
        handle = asyncio.Handle(callback, (), self, contextvars.Context())
        self._ready.appendleft(handle)  # type: ignore[attr-defined]

    def _check_closed(self) -> None:
        if not self.is_over:
            super()._check_closed()  # type: ignore[misc]

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        ready: collections.deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        while timers and (timers[0].cancelled() or _is_dead(timers[0])):
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Stuck("no callback is ready and no timer is set")
            if timers[0].when() > self._now_s:
                self._now_s = timers[0].when()
                self._num_now = 0
        while timers and timers[0].when() <= self._now_s:
            ready.append(heapq.heappop(timers))
        for _ in range(len(ready)):
            self._run_one(ready.popleft())

    def _run_one(self, handle: asyncio.Handle) -> None:
        process: Process | None = handle._context.get(CURRENT)  # type: ignore[attr-defined]
        if handle.cancelled() or (process is not None and process.is_dead):
            return
        if process is not None and process.is_stopped:
            process.held.append(handle)
            return
        self.num_callbacks += 1
        # A loop that sleeps for the rest of a rounding error ends, as it does on a real clock.
        self._now_s += CALLBACK_S
        self._num_now += 1
        if self._num_now > MOST_CALLBACKS:
            raise Stuck(f"{self._num_now} callbacks at {self._now_s:.3f} s; the last: {handle}")
        handle._run()

    def bury(self) -> None:
        """Close the coroutines that no killed process will ever continue, and the loop."""
        self.is_over = True
        sys.unraisablehook = lambda error: None
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # What their `finally` blocks do has no effect: the loop runs nothing any more.
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self.close()
        self._kept.clear()

    def resume(self, process: Process) -> None:
        """Continue a stopped process with the callbacks that waited."""
        process.is_stopped = False
        while process.held:
            self._ready.append(process.held.popleft())  # type: ignore[attr-defined]

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the work in this thread, after the time that it takes."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        self.call_later(self._thread_s(), work)
        return future

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        context = contextvars.copy_context()
        current().signals[sig] = lambda: self.call_soon(callback, *args, context=context)

    def remove_signal_handler(self, sig: int) -> bool:
        process = CURRENT.get()
        return process is not None and process.signals.pop(sig, None) is not None


def kill(process: Process) -> None:
    """End a process now. Its coroutines stay as they are."""
    process.is_dead = True
    process.held.clear()
    while process.on_death:
        process.on_death.pop()()


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Call the handler of a signal; return False if the process has none."""
    handler = process.signals.get(number)
    if handler is None or process.is_dead:
        return False
    handler()
    return True


def _is_dead(handle: asyncio.Handle) -> bool:
    process: Process | None = handle._context.get(CURRENT)  # type: ignore[attr-defined]
    return process is not None and process.is_dead
