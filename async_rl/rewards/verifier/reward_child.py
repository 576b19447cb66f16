"""The process in which reward functions run, and its owner's side: it may hang, crash or print, the
verifier lives on.

takes: one line per call; waits for: the next line, or a running function; gives: one line per score
or failure; ends with its owner, whose pipe closes. Invariants: a call ends after reward.timeout_s,
because its process does; the calls that were beside it are asked again in a new one, alone where
nobody knows whose fault the end was; so is a call that is late because another one keeps the event
loop to itself, and that other one alone; a failure is a RewardError and never a score. Used by
service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from async_rl.config.reward_terms import functions_of
from async_rl.config.rewards import RewardConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.os import die_with_parent
from async_rl.core.types import Value
from async_rl.rewards.functions import RewardFunction, find_function, read_score
from async_rl.rewards.verifier.protocol import RewardSample

_LINE_LIMIT = 1 << 28
_TRIES = 3
_WHO_S = 1.0
"""Within this time a process says which of its calls keeps the event loop to itself; code in C may
keep even that from being said.
"""
_ALONE_ON_LOOP = (
    " and kept the event loop to itself: define it with def, not async def, or await what it"
    " waits for"
)
_LOADED, _WHO = -1, -2
"""Numbers of results that answer no call."""
_NOBODY, _UNKNOWN = -3, -4
"""In place of a call's number: no call is to blame, or nobody knows which."""


class Call(Value):
    """One function asked about one sample."""

    number: int
    function: str
    sample: RewardSample


class Result(Value):
    """Its parts, or why there are none. number _LOADED: the functions are loaded, or could not be;
    _WHO: `blocking` keeps the loop.
    """

    number: int
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""
    blocking: int = _NOBODY


class _Ended(Exception):
    """The process ended under a call; is_own: by itself, so that any call in it may be to blame."""

    def __init__(self, code: int, *, is_own: bool) -> None:
        super().__init__(code)
        self.code, self.is_own = code, is_own


class RewardFunctions:
    """The functions that a configuration names, in a process of their own that is made again when
    it ended.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self.names = functions_of(reward)
        self._shared: _Child | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(reward.concurrency)
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        """Loads the functions, if there are any. Raises ConfigError where one cannot be had."""
        if self.names:
            self._shared = await _Child.start(self._reward)

    async def score(
        self, names: Sequence[str], sample: RewardSample
    ) -> dict[str, dict[str, float]]:
        """The parts of each function. Raises RewardError."""
        if missing := [name for name in names if name not in self.names]:
            raise RewardError(
                f"this verifier knows no function {', '.join(missing)}; it was started without that"
                " reward.fn"
            )
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(self._score(name, sample)) for name in names}
        return {name: task.result() for name, task in tasks.items()}

    async def _score(self, name: str, sample: RewardSample) -> dict[str, float]:
        async with self._slots:
            for _ in range(_TRIES):
                try:
                    return await (await self._child()).ask(name, sample, self._reward.timeout_s)
                except _Ended as ended:
                    if ended.is_own:
                        break
            return await self._score_alone(name, sample)

    async def _score_alone(self, name: str, sample: RewardSample) -> dict[str, float]:
        """In a process with no other call, so that its end is this call's."""
        async with self._alone:
            child = await _Child.start(self._reward)
            try:
                return await child.ask(name, sample, self._reward.timeout_s)
            except _Ended as ended:
                raise RewardError(
                    f"{name} ended its process with exit code {ended.code}; it must return a score"
                ) from ended
            finally:
                await child.end()

    async def _child(self) -> _Child:
        async with self._starting:
            if self._shared is None or self._shared.has_ended:
                self._shared = await _Child.start(self._reward)
            return self._shared

    async def close(self) -> None:
        """End the process."""
        if self._shared is not None:
            await self._shared.end()


class _Child:
    """One process and the calls in it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._reading = asyncio.create_task(self._read(), name="read scores")
        self._was_ended = False
        self._to_blame = _NOBODY

    @classmethod
    async def start(cls, reward: RewardConfig) -> _Child:
        """A process whose functions are loaded. Raises ConfigError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, limit=_LINE_LIMIT
        )
        child = cls(process)
        child._send(reward)
        try:
            loaded = await child._result(_LOADED, reward.load_timeout_s)
        except _Ended as ended:
            raise ConfigError(
                f"loading {', '.join(functions_of(reward))} ended the process with exit code"
                f" {ended.code}"
            ) from ended
        except RewardError as late:
            raise ConfigError(
                f"reward.load_timeout_s={reward.load_timeout_s:g}: the functions were not loaded by"
                " then; raise it"
            ) from late
        if loaded.error:
            await child.end()
            raise ConfigError(loaded.error)
        return child

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._was_ended or self._reading.done()

    async def ask(self, name: str, sample: RewardSample, timeout_s: float) -> dict[str, float]:
        """The parts. Raises RewardError if the function failed or hung, _Ended if the process ended
        under it.
        """
        number = next(self._numbers)
        self._send(Call(number=number, function=name, sample=sample))
        try:
            result = await self._result(number, timeout_s)
        except RewardError as late:
            raise RewardError(
                f"{name} gave no score within {timeout_s:g} s (reward.timeout_s){late}; its process"
                " was ended"
            ) from late
        if result.error:
            raise RewardError(result.error)
        return result.parts

    def _send(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _result(self, number: int, timeout_s: float) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if self._reading.done():
            self._waiting.pop(number)
            raise _Ended(self._process.returncode or 0, is_own=not self._was_ended)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            blocking = self._to_blame
            if not self.has_ended:
                blocking = _NOBODY if number == _LOADED else await self._who_blocks()
            culprit = number if blocking == _NOBODY else blocking
            if not self.has_ended:
                self._to_blame = culprit
                self._waiting.pop(number)
                await self.end()
            if culprit != number:
                raise _Ended(0, is_own=culprit == _UNKNOWN) from error
            raise RewardError("" if blocking == _NOBODY else _ALONE_ON_LOOP) from error
        finally:
            self._waiting.pop(number, None)

    async def _who_blocks(self) -> int:
        """The call that keeps the event loop to itself; _UNKNOWN if the process cannot say."""
        answer = self._waiting.setdefault(_WHO, asyncio.get_running_loop().create_future())
        self._process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(_WHO_S):
                return (await asyncio.shield(answer)).blocking
        except TimeoutError:
            return _UNKNOWN

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            result = msgspec.json.decode(line, type=Result)
            waiting = self._waiting.get(result.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(result)
        code = await self._process.wait()
        for number, waiting in self._waiting.items():
            if number == _WHO and not waiting.done():
                waiting.set_result(Result(number=_WHO, blocking=_UNKNOWN))
            elif not waiting.done():
                waiting.set_exception(
                    _Ended(code, is_own=not self._was_ended or self._to_blame in (number, _UNKNOWN))
                )

    async def end(self) -> None:
        """Kill it; its calls get _Ended."""
        self._was_ended = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._reading


class _Functions:
    """The child's side: the functions and the threads in which plain ones run."""

    def __init__(self, functions: dict[str, RewardFunction], concurrency: int) -> None:
        self._functions = functions
        self._threads = ThreadPoolExecutor(concurrency, "reward")
        self._on_loop: dict[asyncio.Future[object], int] = {}

    def blocking(self) -> int:
        """The call that is running on the event loop at this moment."""
        running = asyncio.current_task()
        return _NOBODY if running is None else self._on_loop.get(running, _NOBODY)

    async def answer(self, call: Call) -> Result:
        """Calls the function and reads what it gives; whatever it raises becomes the error."""
        function, loop = self._functions[call.function], asyncio.get_running_loop()
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        ):
            work: asyncio.Future[object] = asyncio.ensure_future(function(call.sample))
            self._on_loop[work] = call.number
        else:
            work = loop.run_in_executor(self._threads, function, call.sample)
        await asyncio.wait({work})
        self._on_loop.pop(work, None)
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            return Result(
                number=call.number,
                error=f"{call.function} raised {type(error).__name__}: {str(error)[:300]}",
            )
        try:
            return Result(number=call.number, parts=read_score(call.function, work.result()))
        except RewardError as wrong:
            return Result(number=call.number, error=str(wrong))


async def _serve(incoming: int, outgoing: int) -> None:
    reader = asyncio.StreamReader(limit=_LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb")
    )
    reward = msgspec.json.decode(await reader.readline(), type=RewardConfig)

    def give(result: Result) -> None:
        line = memoryview(msgspec.json.encode(result) + b"\n")
        while line:
            line = line[os.write(outgoing, line) :]

    try:
        functions = _Functions(
            {name: find_function(name, reward) for name in functions_of(reward)}, reward.concurrency
        )
    except ConfigError as error:
        give(Result(number=_LOADED, error=str(error)))
        return

    def tell_who_blocks(*_: object) -> None:
        """Runs wherever the loop's thread is: inside a function that blocks it, or else between two
        lines of ours, which may be `give`.
        """
        answer = Result(number=_WHO, blocking=functions.blocking())
        if answer.blocking == _NOBODY:
            loop.call_soon_threadsafe(give, answer)
        else:
            give(answer)

    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGUSR1, tell_who_blocks)
    give(Result(number=_LOADED))
    running: set[asyncio.Task[Result]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(functions.answer(msgspec.json.decode(line, type=Call)))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda done: give(done.result()))


def main() -> None:
    """The child. What functions print goes to stderr; the pipes are out of their reach."""
    die_with_parent()
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    asyncio.run(_serve(incoming, outgoing))
    os._exit(0)  # threads of functions that hang would keep it


if __name__ == "__main__":
    main()
