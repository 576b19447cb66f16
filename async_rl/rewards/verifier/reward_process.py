"""The owner of the child process that runs the reward functions (`reward_child.py`).

Takes calls, waits for the child, and returns scores or raises RewardError; a failure is never a
score. Invariants: a call fails after `timeouts.function_s`, because its process is killed. The
other calls of a killed process are repeated in a new one. A call that may be at fault is repeated
in a process without other calls: when the process was not killed by us, when the blocking call is
unknown, or when the call is the one that blocks the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from async_rl.config.base import as_builtins
from async_rl.config.reward_terms import functions_of
from async_rl.config.rewards import RewardConfig
from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.rewards.child_process import ChildProcess
from async_rl.rewards.verifier import reward_child
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rewards.verifier.reward_child import (
    BLOCKING,
    LOADED,
    NO_CALL,
    UNKNOWN_CALL,
    LoadFunctions,
    Result,
    RewardCall,
)

_TRIES = 3
_BLOCKING_TIMEOUT_S = 1.0
"""Time for a process to report which call blocks its event loop. Code in C may block that too."""
_BLOCKED_LOOP = (
    " and blocked the event loop: define it with def instead of async def, or await its slow calls"
)


class _ChildEnded(Exception):
    """The process exited during a call. is_suspect: this call may be the reason."""

    def __init__(self, code: int, *, is_suspect: bool) -> None:
        super().__init__(code)
        self.code, self.is_suspect = code, is_suspect


class RewardProcess:
    """The functions of a configuration, in a child that is replaced after it exits."""

    def __init__(self, reward: RewardConfig, *, timeouts: TimeoutsConfig) -> None:
        self._reward, self._timeouts = reward, timeouts
        self.names = functions_of(reward)
        self._shared: _Child | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(reward.concurrency)
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        """Load the functions, if there are any. Raises ConfigError if one cannot be loaded."""
        if self.names:
            await self._child()

    async def score(
        self, names: Sequence[str], sample: RewardSample
    ) -> dict[str, dict[str, float]]:
        """The parts of each function's score. Raises RewardError."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise RewardError(
                f"this verifier knows no function {', '.join(missing)}; it was started without that"
                " reward.terms"
            )
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(self._score(name, sample)) for name in names}
        return {name: task.result() for name, task in tasks.items()}

    async def _score(self, name: str, sample: RewardSample) -> dict[str, float]:
        async with self._slots:
            for _ in range(_TRIES):
                child = await self._child()
                try:
                    return await child.score(name, sample)
                except _ChildEnded as ended:
                    # In the shared process a suspect would stop the calls of other samples again.
                    if ended.is_suspect:
                        break
            return await self._score_alone(name, sample)

    async def _score_alone(self, name: str, sample: RewardSample) -> dict[str, float]:
        """Call the function in a process without other calls, so that its end is this call's."""
        async with self._alone:
            child = await _Child.start(self._reward, self._timeouts)
            try:
                return await child.score(name, sample)
            except _ChildEnded as ended:
                raise RewardError(
                    f"{name} made its process exit with code {ended.code}; it must return a score"
                ) from ended
            finally:
                await child.kill()

    async def _child(self) -> _Child:
        # Calls that find the process exited at the same time must start one new process, not one
        # each.
        async with self._starting:
            if self._shared is None or self._shared.has_ended:
                self._shared = await _Child.start(self._reward, self._timeouts)
            return self._shared

    async def close(self) -> None:
        """End the process."""
        if self._shared is not None:
            await self._shared.kill()


class _Child:
    """One process and the calls in it."""

    def __init__(self, process: ChildProcess[Result], timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._reading = asyncio.create_task(self._read(), name="read scores")
        self._was_killed = False
        self._culprit = NO_CALL

    @classmethod
    async def start(cls, reward: RewardConfig, timeouts: TimeoutsConfig) -> _Child:
        """Start a process and load the functions. Raises ConfigError."""
        process = await ChildProcess.start(reward_child.__name__, Result)
        child = cls(process, timeouts.function_s)
        load_s = timeouts.load_functions_s
        load = LoadFunctions(reward=as_builtins(reward), limit_s=timeouts.function_s)
        try:
            async with asyncio.timeout(load_s):
                loaded = await child._exchange(LOADED, load)
        except _ChildEnded as ended:
            raise ConfigError(
                f"loading {', '.join(functions_of(reward))} made the process exit with code"
                f" {ended.code}"
            ) from ended
        except TimeoutError as late:
            await child.kill()
            raise ConfigError(
                f"the reward functions were not loaded within {load_s:g} s"
                " (2/3 of timeouts.start_s); raise timeouts.start_s"
            ) from late
        except asyncio.CancelledError:
            # No one has the child yet, so no one else would end it.
            await child.kill()
            raise
        if loaded.error:
            await child.kill()
            raise ConfigError(loaded.error)
        return child

    @property
    def has_ended(self) -> bool:
        """True if it accepts no more calls."""
        return self._was_killed or self._reading.done()

    async def score(self, name: str, sample: RewardSample) -> dict[str, float]:
        """The parts of a score.

        Raises RewardError if the function failed or hung, _ChildEnded if the process exited during
        the call.
        """
        number = next(self._numbers)
        call = RewardCall(number=number, function=name, sample=sample)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._exchange(number, call)
        except TimeoutError:
            await self._on_late(number, name)
        if result.error:
            raise RewardError(result.error)
        return result.parts

    async def _exchange(self, number: int, message: msgspec.Struct) -> Result:
        if self._reading.done():
            raise _ChildEnded(await self._process.exit_code(), is_suspect=not self._was_killed)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._process.send(message)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _on_late(self, number: int, name: str) -> NoReturn:
        """Find the call to blame, and kill the process unless another late call has."""
        blocking = self._culprit if self.has_ended else await self._blocking_call()
        culprit = number if blocking == NO_CALL else blocking
        if not self.has_ended:
            self._culprit = culprit
            await self.kill()
        if culprit != number:
            raise _ChildEnded(0, is_suspect=culprit == UNKNOWN_CALL)
        advice = "" if blocking == NO_CALL else _BLOCKED_LOOP
        raise RewardError(
            f"{name} gave no score within {self._timeout_s:g} s (timeouts.group_s / 12){advice};"
            " its process was killed"
        )

    async def _blocking_call(self) -> int:
        """The call that blocks the event loop; UNKNOWN_CALL if the process cannot report it."""
        future = self._waiting.setdefault(BLOCKING, asyncio.get_running_loop().create_future())
        self._process.interrupt()
        try:
            async with asyncio.timeout(_BLOCKING_TIMEOUT_S):
                return (await asyncio.shield(future)).blocking
        except TimeoutError:
            return UNKNOWN_CALL

    async def _read(self) -> None:
        while True:
            result = await self._process.receive()
            if result is None:
                break
            future = self._waiting.get(result.number)
            if future is not None and not future.done():
                future.set_result(result)
        code = await self._process.exit_code()
        for number, future in self._waiting.items():
            if future.done():
                continue
            if number == BLOCKING:
                future.set_result(Result(number=BLOCKING, blocking=UNKNOWN_CALL))
            else:
                is_suspect = not self._was_killed or self._culprit in (number, UNKNOWN_CALL)
                future.set_exception(_ChildEnded(code, is_suspect=is_suspect))

    async def kill(self) -> None:
        """End the process; its calls raise _ChildEnded."""
        self._was_killed = True
        self._process.kill()
        await self._reading
