"""Owner and child of a child process that answers requests: lines of JSON in, lines of JSON out.

Code that may hang, crash or print runs in such a child, so that its owner can end it. A child dies
with the thread that started it. Its standard output belongs to its answers: output of the code that
it runs is redirected to standard error. Each line is a pair of the number of a request and a
message, so that requests may overlap and are answered in any order. Invariant: every request is
answered or raises ChildEnded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from async_rl.core.os import die_with_parent

_LINE_LIMIT = 1 << 28
"""Longest answer in bytes: far above any, so that only a broken child can reach it."""
M = TypeVar("M", bound=msgspec.Struct)


class ChildEnded(Exception):
    """The child exited before it answered. code: its exit status, or the signal as a negative
    number.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ChildProcess(Generic[M]):
    """The owner's end. Made by `start`. pid: id of the child."""

    def __init__(self, process: Process, answer: type[M]) -> None:
        self._process = process
        self._requests: Any = process.stdin
        self._answers: Any = process.stdout
        self.pid = process.pid
        self._decoder: Any = msgspec.json.Decoder(tuple[int, answer])  # type: ignore[valid-type]
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[M]] = {}
        self._reading = asyncio.create_task(self._read(), name="read answers of a child")

    @classmethod
    async def start(
        cls, module: str, answer: type[M], *args: str, **options: Any
    ) -> ChildProcess[M]:
        """Start `module` as a program that answers with messages of the given type.

        options: of asyncio.create_subprocess_exec.
        """
        # A new program instead of multiprocessing, which would run the main module of a
        # user's script again.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *args),
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_LIMIT,
            **options,
        )
        return cls(process, answer)

    @property
    def has_ended(self) -> bool:
        """True once the child has exited."""
        return self._reading.done()

    async def ask(self, message: msgspec.Struct) -> M:
        """The answer to a request. Raises ChildEnded."""
        if self._reading.done():
            raise ChildEnded(self._reading.result())
        number = next(self._numbers)
        future = asyncio.Future[M]()
        self._waiting[number] = future
        self._requests.write(_line(number, message))
        try:
            return await future
        finally:
            del self._waiting[number]

    async def _read(self) -> int:
        while line := await self._answers.readline():
            number, answer = self._decoder.decode(line)
            # The request may have been cancelled.
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(answer)
        code = await self._process.wait()
        # The event loop may end before it notices the broken pipe; Python 3.12 warns then.
        self._requests.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChildEnded(code))
        return code

    async def kill(self) -> None:
        """End the child; its requests raise ChildEnded."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait([self._reading])


class ParentPipes:
    """The child's end. The pipes get descriptors that the code in the child does not know."""

    def __init__(self) -> None:
        die_with_parent()
        self._incoming = os.fdopen(os.dup(0), "rb")
        self._outgoing = os.dup(1)
        # Threads may answer too, and two lines must not mix.
        self.sending = threading.RLock()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # A print of the code would otherwise mix with the lines of answers.
        os.dup2(2, 1)

    def receive(self, request: type[M]) -> tuple[int, M]:
        """Wait for the next request; its number and its message. Exits if there is none."""
        line = self._incoming.readline()
        if not line:
            os._exit(0)  # threads of code that hangs would keep the process alive
        expected: Any = tuple[int, request]  # type: ignore[valid-type]
        numbered: tuple[int, M] = msgspec.json.decode(line, type=expected)
        return numbered

    async def serve(
        self, request: type[M], answer: Callable[[int, M], Coroutine[Any, Any, None]]
    ) -> None:
        """Call `answer` with each request, side by side on this event loop; never returns."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                asyncio.run_coroutine_threadsafe(answer(*self.receive(request)), loop)

        # Not the main thread, where the event loop runs: some packages require that one. A daemon,
        # so that a function that calls sys.exit ends the process although this thread waits.
        threading.Thread(target=read, daemon=True).start()
        await asyncio.Event().wait()

    def send(self, number: int, message: msgspec.Struct) -> None:
        """Answer a request."""
        rest = memoryview(_line(number, message))
        with self.sending:
            while rest:
                # A pipe may accept only a part of a long line.
                rest = rest[os.write(self._outgoing, rest) :]


def _line(number: int, message: msgspec.Struct) -> bytes:
    return msgspec.json.encode((number, message)) + b"\n"
