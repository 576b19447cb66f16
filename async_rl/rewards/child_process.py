"""Owner and child of a child process of the verifier: JSON lines in, JSON lines out.

Code that may hang, crash or print runs in such a child, so that the verifier can end it. A child
dies with the thread that started it. Its standard output belongs to its results: output of the code
that it runs is redirected to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Generic, TypeVar

import msgspec

from async_rl.core.os import die_with_parent

LINE_LIMIT = 1 << 28
"""Longest line in bytes."""
A = TypeVar("A", bound=msgspec.Struct)


class ChildProcess(Generic[A]):
    """The owner's end. Made by `start`."""

    def __init__(self, process: Process, answer: type[A]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._decoder = msgspec.json.Decoder(answer)

    @classmethod
    async def start(cls, module: str, answer: type[A]) -> ChildProcess[A]:
        """Start `module` as a program that writes answers of the given type."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, stdin=PIPE, stdout=PIPE, limit=LINE_LIMIT
        )
        return cls(process, answer)

    def send(self, message: msgspec.Struct) -> None:
        """Send one line."""
        self._stdin.write(_line(message))

    async def receive(self) -> A | None:
        """The next answer; None when the child has exited."""
        line = await self._stdout.readline()
        return self._decoder.decode(line) if line else None

    async def exit_code(self) -> int:
        """Wait for the end of the child; the exit status, or the signal as a negative number."""
        code = await self._process.wait()
        # The event loop may end before it notices the broken pipe; Python 3.12 warns then.
        self._stdin.close()
        return code

    def interrupt(self) -> None:
        """Send SIGUSR1."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the child."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class ParentPipes:
    """The child's end. The pipes get descriptors that the code in the child does not know."""

    def __init__(self) -> None:
        die_with_parent()
        self.incoming, self._outgoing = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # A print of the code would otherwise mix with the lines of results.
        os.dup2(2, 1)

    def send(self, message: msgspec.Struct) -> None:
        """Write one line."""
        rest = memoryview(_line(message))
        while rest:
            # A pipe may accept only a part of a long line.
            rest = rest[os.write(self._outgoing, rest) :]


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
