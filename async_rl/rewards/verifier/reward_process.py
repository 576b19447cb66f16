"""Reward functions in a child process: the owner's end, and the child that runs them.

Takes calls, waits for the child, and returns scores or raises RewardError; a failure is never a
score. In the child, async functions run on one event loop and plain functions in threads.
Invariants: a call fails after `timeouts.function_s`, because its process exits then. The other
calls of that process are repeated in a new one. A call that may be at fault is repeated in a
process without other calls: the process crashed, or the call may be the one that blocks the event
loop.
"""

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.config.base import as_builtins
from async_rl.config.rewards import RewardConfig
from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import ConfigError, RewardError, raised_at
from async_rl.core.frozen import Value
from async_rl.rewards.child_process import ChildEnded, ChildProcess, ParentPipes
from async_rl.rewards.functions import find_function, read_score
from async_rl.rewards.verifier.protocol import FunctionScores, Parts, RewardSample

_TRIES = 3
"""Processes that may exit because of other calls before a call gets a process of its own."""
_LATE = 113
"""Exit code of a process that has reported a late call; few functions exit with this code."""
_ANSWERS_S = 0.5
"""Time in which an event loop that is not blocked runs a callback, even on a busy machine."""
_GRACE_S = 2.0
"""Time for the child to report a late call, before its owner kills it."""


class LoadFunctions(Value):
    """The first message: the section `reward` of the configuration, and the longest call."""

    reward: dict[str, Any]
    limit_s: float


class RewardCall(Value):
    """One call of a function."""

    function: str
    sample: RewardSample


class Result(Value):
    """The parts of a score, or the reason why there are none.

    is_suspect: the call may be at fault, and a process of its own would show it.
    """

    parts: Parts = msgspec.field(default_factory=dict)
    error: str = ""
    is_suspect: bool = False


class RewardProcess:
    """The functions of a configuration, in a child that is replaced after it exits."""

    def __init__(self, reward: RewardConfig, *, timeouts: TimeoutsConfig) -> None:
        self._reward = reward
        self._timeouts = timeouts
        self.names = reward.functions
        self._shared: ChildProcess[Result] | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(reward.concurrency)
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        """Load the functions, if there are any. Raises ConfigError if one cannot be loaded."""
        if self.names:
            await self._child()

    async def score(self, names: Sequence[str], sample: RewardSample) -> FunctionScores:
        """The parts of each function's score. Raises RewardError."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise RewardError(
                f"this verifier knows no function {', '.join(missing)}; it was started without that"
                " reward.terms"
            )
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(self._score(RewardCall(function=name, sample=sample)))
                for name in names
            }
        return {name: task.result() for name, task in tasks.items()}

    async def _score(self, call: RewardCall) -> Parts:
        # Also while a call is repeated, so that the child never runs more calls than it may.
        async with self._slots:
            for _ in range(_TRIES):
                with contextlib.suppress(ChildEnded):
                    result = await self._result(await self._child(), call)
                    break
            else:
                result = Result(is_suspect=True)
            # In the shared process a suspect would stop the calls of other samples again.
            if result.is_suspect:
                # One at a time, because each process loads the functions and their models again.
                async with self._alone:
                    child = await self._start()
                    try:
                        # Without other calls, so that its exit is the fault of this one.
                        result = await self._result(child, call)
                    finally:
                        await child.kill()
        if result.error:
            raise RewardError(result.error)
        return result.parts

    async def _result(self, child: ChildProcess[Result], call: RewardCall) -> Result:
        """The result of a call. Raises ChildEnded if its process exited because of another call."""
        limit_s = self._timeouts.function_s
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                return await child.ask(call)
        except TimeoutError:
            # Code in C that keeps the interpreter's lock also stops the child's own timers.
            await child.kill()
            return Result(error=_late(call, limit_s), is_suspect=True)
        except ChildEnded as ended:
            if ended.code == _LATE:
                raise
            error = f"{call.function} made its process exit with code {ended.code}"
            return Result(error=f"{error}; it must return a score", is_suspect=True)

    async def _child(self) -> ChildProcess[Result]:
        # Calls that find the process exited at the same time must start one new process, not one
        # each.
        async with self._starting:
            if self._shared is None or self._shared.has_ended:
                self._shared = await self._start()
            return self._shared

    async def _start(self) -> ChildProcess[Result]:
        """Start a process and load the functions. Raises ConfigError."""
        child = await ChildProcess.start(__name__, Result)
        load_s = self._timeouts.load_functions_s
        limit_s = self._timeouts.function_s
        load = LoadFunctions(reward=as_builtins(self._reward), limit_s=limit_s)
        problem = "cancelled"
        try:
            async with asyncio.timeout(load_s):
                problem = (await child.ask(load)).error
        except ChildEnded as ended:
            names = ", ".join(self.names)
            problem = f"loading {names} made the process exit with code {ended.code}"
        except TimeoutError:
            problem = (
                f"the reward functions were not loaded within {load_s:g} s"
                " (2/3 of timeouts.start_s); raise timeouts.start_s"
            )
        finally:
            # Also when this task is cancelled: no one has the child yet who could end it.
            if problem:
                await child.kill()
        if problem:
            raise ConfigError(problem)
        return child

    async def close(self) -> None:
        """End the process."""
        if self._shared is not None:
            await self._shared.kill()


def _late(call: RewardCall, limit_s: float) -> str:
    return (
        f"{call.function} gave no score within {limit_s:g} s (timeouts.group_s / 12) and its"
        " process was killed; if it is an async function that blocks the event loop, define it with"
        " def instead of async def, or await its slow calls"
    )


class _Functions:
    """The child: its functions, and the threads that run the plain (not async) functions."""

    def __init__(self, parent: ParentPipes, load: LoadFunctions) -> None:
        """Load the functions. Raises ConfigError."""
        reward = RewardConfig.model_validate(load.reward)
        self._parent = parent
        self._limit_s = load.limit_s
        self._functions = {
            name: find_function(name, reward, limit_s=load.limit_s) for name in reward.functions
        }
        self._threads = ThreadPoolExecutor(reward.concurrency, "reward")
        self._running: dict[asyncio.Future[object], tuple[int, RewardCall]] = {}
        self._loop = asyncio.get_running_loop()

    async def answer(self, number: int, call: RewardCall) -> None:
        """Call the function and send its score; anything that it raises becomes the error."""
        function = self._functions[call.function]
        # A callable object is async if its method __call__ is.
        if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            work: asyncio.Future[object] = asyncio.ensure_future(function(call.sample))
        else:
            work = self._loop.run_in_executor(self._threads, function, call.sample)
        self._running[work] = (number, call)
        # In a thread: the loop's timers stop while a function blocks the loop.
        timer = threading.Timer(self._limit_s, self._exit_late, (work,))
        # Otherwise the end of the process would wait for the deadline.
        timer.daemon = True
        timer.start()
        await asyncio.wait({work})
        timer.cancel()
        del self._running[work]
        self._parent.send(number, _result_of(call.function, work))

    def _exit_late(self, late: asyncio.Future[object]) -> None:
        """Report the call that made another one late, and exit. Runs in a thread."""
        answers = threading.Event()
        self._loop.call_soon_threadsafe(answers.set)
        is_blocked = not answers.wait(_ANSWERS_S)
        # Until the exit: a second late call must not report other suspects.
        with self._parent.sending:
            running = dict(self._running)
            if late not in running:
                return
            suspects = [late]
            if is_blocked:
                # A task that a function has started is unknown; any call may be its owner.
                blocking: Any = asyncio.current_task(self._loop)
                suspects = [blocking] if blocking in running else list(running)
            for work in suspects:
                number, call = running[work]
                error = _late(call, self._limit_s)
                is_suspect = work is not late or len(suspects) > 1
                self._parent.send(number, Result(error=error, is_suspect=is_suspect))
            os._exit(_LATE)


def _result_of(name: str, work: asyncio.Future[object]) -> Result:
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    if error is not None:
        raised = f"{name} raised {type(error).__name__}: {str(error)[:300]}"
        return Result(error=raised + raised_at(error))
    try:
        return Result(parts=read_score(name, work.result()))
    except RewardError as wrong:
        return Result(error=str(wrong))


async def _serve() -> None:
    parent = ParentPipes()
    number, load = parent.receive(LoadFunctions)
    try:
        functions = _Functions(parent, load)
    except ConfigError as error:
        parent.send(number, Result(error=str(error)))
        return
    parent.send(number, Result())
    await parent.serve(RewardCall, functions.answer)


if __name__ == "__main__":
    asyncio.run(_serve())
