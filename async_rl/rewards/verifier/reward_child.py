"""The child process that runs the reward functions.

Takes the configuration and then one line per call; writes one line per result. Async functions run
on one event loop, plain ones in threads. A failure becomes an error message and never a score.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.config.reward_terms import functions_of
from async_rl.config.rewards import RewardConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.frozen import Value
from async_rl.rewards.child_process import LINE_LIMIT, ParentPipes
from async_rl.rewards.functions import RewardFunction, find_function, read_score
from async_rl.rewards.verifier.protocol import RewardSample

LOADED, BLOCKING = -1, -2
"""Numbers of results that answer no call."""
NO_CALL, UNKNOWN_CALL = -3, -4
"""Values of `Result.blocking`: no call blocks the event loop, or it is not known which one does."""


class LoadFunctions(Value):
    """The first message: the section `reward` of the configuration, and the longest call."""

    reward: dict[str, Any]
    limit_s: float


class RewardCall(Value):
    """One call of a function."""

    number: int
    function: str
    sample: RewardSample


class Result(Value):
    """The parts of a score, or the reason why there are none.

    number: of the call; or LOADED: the functions are loaded, or could not be; or BLOCKING: the call
    `blocking` runs on the event loop and does not return to it.
    """

    number: int
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""
    blocking: int = NO_CALL


class _Functions:
    """The functions, and the threads that run the plain (not async) functions."""

    def __init__(self, functions: dict[str, RewardFunction], concurrency: int) -> None:
        self._functions = functions
        self._threads = ThreadPoolExecutor(concurrency, "reward")
        self._on_loop: dict[asyncio.Future[object], int] = {}

    def blocking(self) -> int:
        """The call that runs on the event loop at this moment."""
        running = asyncio.current_task()
        return NO_CALL if running is None else self._on_loop.get(running, NO_CALL)

    async def answer(self, call: RewardCall) -> Result:
        """Call the function and read its score; anything that it raises becomes the error."""
        function, loop = self._functions[call.function], asyncio.get_running_loop()
        if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            work: asyncio.Future[object] = asyncio.ensure_future(function(call.sample))
            self._on_loop[work] = call.number
        else:
            work = loop.run_in_executor(self._threads, function, call.sample)
        await asyncio.wait({work})
        self._on_loop.pop(work, None)
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            reason = (
                f"{call.function} raised {type(error).__name__}: {str(error)[:300]}{_where(error)}"
            )
            return Result(number=call.number, error=reason)
        try:
            return Result(number=call.number, parts=read_score(call.function, work.result()))
        except RewardError as wrong:
            return Result(number=call.number, error=str(wrong))


def _where(error: BaseException) -> str:
    """Return the file and line that raised, for the author of the function."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


async def _serve(parent: ParentPipes) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(parent.incoming, "rb")
    )
    load = msgspec.json.decode(await reader.readline(), type=LoadFunctions)
    reward = RewardConfig.model_validate(load.reward)
    try:
        loaded = {
            name: find_function(name, reward, limit_s=load.limit_s) for name in functions_of(reward)
        }
    except ConfigError as error:
        parent.send(Result(number=LOADED, error=str(error)))
        return
    functions = _Functions(loaded, reward.concurrency)

    def report_blocking(*_: object) -> None:
        """Answer SIGUSR1, in the thread of the loop.

        The signal arrives inside a function that blocks the loop, or between two lines of our own
        code. The latter may be writing a line, so the answer then waits for the loop.
        """
        answer = Result(number=BLOCKING, blocking=functions.blocking())
        if answer.blocking == NO_CALL:
            loop.call_soon_threadsafe(parent.send, answer)
        else:
            parent.send(answer)

    signal.signal(signal.SIGUSR1, report_blocking)
    parent.send(Result(number=LOADED))
    running: set[asyncio.Task[Result]] = set()

    def finish(task: asyncio.Task[Result]) -> None:
        running.discard(task)
        parent.send(task.result())

    while True:
        line = await reader.readline()
        if not line:
            return
        task = asyncio.create_task(functions.answer(msgspec.json.decode(line, type=RewardCall)))
        running.add(task)
        task.add_done_callback(finish)


def main() -> None:
    """Serve until the input is closed."""
    asyncio.run(_serve(ParentPipes()))
    os._exit(0)  # threads of functions that hang would keep the process alive


if __name__ == "__main__":
    main()
