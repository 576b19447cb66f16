"""The host's side of one cell: starts it, sends it one piece of work at a time, and kills it at any
anomaly.

Takes a job or a command, waits for the cell's reply, and returns an outcome, or raises
`CellFailed`; the cell is then dead and is thrown away. Invariants: a cell dies with the thread that
started it (PR_SET_PDEATHSIG) and when its socket closes; memory files are always closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from .protocol import (
    JOBS,
    STDERR_BYTES,
    CommandSpec,
    Frames,
    Hello,
    JobSpec,
    Reply,
    pack,
    read_frames,
)

T = TypeVar("T", covariant=True)
# A thousand times the usual start: with numpy it takes 60 ms, on a crowded machine seconds.
_START_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 1.0
_MAX_REPLY_BYTES = 4096
# A busy machine may delay work by this factor and these seconds; a cell that needs longer counts
# as broken.
_CROWDED, _GRACE_S = 8, 60.0
# More than a compiled program may have, so that the caller can tell that one is too large.
_MAX_PRODUCT_BYTES = 1 << 28
# This version writes no back references. Arguments that are one object here arrive as several, so
# a call cannot change the arguments of the next call.
_MARSHAL_VERSION = 2
_ENVIRONMENT = {
    # The same for every program, so that a verdict can be repeated.
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/tmp",
    # One heap for all threads: each further one would reserve address space, which is limited.
    "MALLOC_ARENA_MAX": "1",
    "PYTHONUTF8": "1",
    # a zygote with threads could not fork
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # otherwise each child binds symbols again, and each binding dirties a page
    "LD_BIND_NOW": "1",
}
_COMMAND = [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B"]
_ENTRY = str(Path(__file__).with_name("entry.py"))


class CellFailed(Exception):
    """The cell broke or did not answer. This says nothing about the program."""


class Work(Protocol[T]):
    """A job or a command: its spec, the files that it needs, and how its outcome is read."""

    @property
    def spec(self) -> JobSpec | CommandSpec:
        """The limits."""

    def files(self) -> list[bytes | int]:
        """The contents of its memory files; a number is a descriptor that stays the caller's."""

    def outcome(self, reply: Reply, files: Sequence[int]) -> T:
        """Read the files after the reply."""


class Outcome(NamedTuple):
    """The output of one child.

    outputs: bytes of each stream run; one byte more than the limit if the program wrote more.
    """

    reply: Reply
    frames: Frames
    is_result_full: bool
    outputs: list[bytes]


class Job(NamedTuple):
    """One Python program to run: limits, the payload of its child, and one input per stream run.

    payload: arguments of the child's part; a program's payload never contains an expected output.
    tests: for Mode.JUDGE; only the judging child can read them. checked: files of Mode.CHECK.
    """

    spec: JobSpec
    payload: tuple[Any, ...]
    inputs: Sequence[bytes] = ()
    tests: tuple[Any, ...] | None = None
    checked: Sequence[bytes] = ()

    def files(self) -> list[bytes | int]:
        """The payload, the result, then the tests, the checked files, or input and output pairs."""
        files: list[bytes | int] = [marshal.dumps(self.payload, _MARSHAL_VERSION), b""]
        if self.tests is not None:
            files.append(marshal.dumps(self.tests, _MARSHAL_VERSION))
        files += self.checked
        for data in self.inputs:
            files += (data, b"")
        return files

    def outcome(self, reply: Reply, files: Sequence[int]) -> Outcome:
        """The frames of the result file, and the outputs."""
        limit = self.spec.output_bytes + 1
        result = os.pread(files[1], limit, 0)
        outputs = [os.pread(fd, limit, 0) for fd in files[3::2]] if self.inputs else []
        return Outcome(
            reply, read_frames(result, self.spec.num_runs), len(result) >= limit, outputs
        )


class CommandOutcome(NamedTuple):
    """The end of a command and its output. errors: standard error, with its middle left out."""

    reply: Reply
    output: bytes
    errors: bytes
    product: bytes


class Command(NamedTuple):
    """A spec with its contents. executable: descriptor, if the spec has no path; contents: of the
    files that the spec names; output_bytes: of standard output that are returned.
    """

    spec: CommandSpec
    stdin: bytes
    contents: Sequence[bytes]
    output_bytes: int
    executable: int | None = None

    def files(self) -> list[bytes | int]:
        """Standard input, output and error, the product, the executable, then the contents."""
        executable = [] if self.executable is None else [self.executable]
        return [self.stdin, b"", b"", b"", *executable, *self.contents]

    def outcome(self, reply: Reply, files: Sequence[int]) -> CommandOutcome:
        """The text and the product of the command."""
        _, output, errors, product, *_ = files
        return CommandOutcome(
            reply,
            os.pread(output, self.output_bytes, 0),
            os.pread(errors, 2 * STDERR_BYTES, 0),
            os.pread(product, _MAX_PRODUCT_BYTES, 0),
        )


class Cell:
    """One cell."""

    def __init__(self, process: subprocess.Popen[bytes], host: socket.socket, hello: Hello) -> None:
        self._process, self._host = process, host
        self.hello = hello

    @classmethod
    async def start(
        cls,
        level: int,
        readable: Sequence[str],
        packages: Mapping[str, str] | None = None,
        *,
        kind: str = JOBS,
    ) -> Cell:
        """Start a cell at the given level. Raises CellFailed with the last line of its stderr.

        readable: directories that it must see besides the system's; packages: names to import, and
        the directory to import each from.
        """
        named = [f"{name}={folder}" for name, folder in (packages or {}).items()]
        host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.setblocking(False)
        arguments = [kind, str(level), str(os.getpid()), str(inside.fileno()), *named, *readable]
        # A file, not a pipe: nobody would read it while the cell starts, and a full pipe would stop
        # it.
        stderr = os.memfd_create("cell-stderr")
        try:
            # Not in a thread: PR_SET_PDEATHSIG ties the cell to the thread that starts it.
            process = subprocess.Popen(  # noqa: ASYNC220  takes a few ms
                [*_COMMAND, _ENTRY, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(inside.fileno(),),
                # One signal to its group ends it, and a Ctrl-C at the terminal does not.
                start_new_session=True,
            )
            inside.close()
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    data = await asyncio.get_running_loop().sock_recv(host, _MAX_REPLY_BYTES)
                if not data:
                    raise CellFailed("it exited")
                return cls(process, host, Hello(*json.loads(data)))
            except (OSError, TimeoutError, CellFailed) as error:
                _kill(process, host)
                lines = os.pread(stderr, 4000, 0).decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else error
                raise CellFailed(f"a cell at level {level} did not start: {reason}") from error
            except BaseException:
                _kill(process, host)
                raise
        finally:
            os.close(stderr)

    @property
    def pid(self) -> int:
        """Process id of the cell's outermost process."""
        return self._process.pid

    async def run(self, work: Work[T]) -> T:
        """Run one piece of work. Raises CellFailed.

        Cancelling stops the work, or kills the cell if it does not answer.
        """
        files: list[int] = []
        own: list[int] = []
        try:
            for content in work.files():
                if isinstance(content, bytes):
                    own.append(_memory_file(content))
                    content = own[-1]
                files.append(content)
            # The cell enforces the limits; this one is for a cell that hangs.
            longest_s = _CROWDED * (work.spec.cpu_s + work.spec.sleep_s) + _GRACE_S
            reply = await self._exchange(pack(work.spec), files, longest_s)
            return work.outcome(reply, files)
        finally:
            for descriptor in own:
                os.close(descriptor)

    async def _exchange(self, spec: bytes, files: list[int], longest_s: float) -> Reply:
        try:
            socket.send_fds(self._host, [spec], files)
            return await self._reply(longest_s)
        except asyncio.CancelledError:
            # The reply must be read, or the next job would take it for its own.
            await self._cancel()
            raise
        except (OSError, TimeoutError, ValueError) as error:
            self.kill()
            raise CellFailed(
                f"cell {self.pid} failed in a job: {error or type(error).__name__}"
            ) from error

    async def _reply(self, longest_s: float) -> Reply:
        async with asyncio.timeout(longest_s):
            data = await asyncio.get_running_loop().sock_recv(self._host, _MAX_REPLY_BYTES)
            return Reply(*json.loads(data))

    async def _cancel(self) -> None:
        """End the running work and read its reply; kill a cell that does not answer."""
        try:
            # Without descriptors, so that the zygote can tell it from a job when it arrives too
            # late.
            self._host.send(b"cancel")
            await self._reply(_CANCEL_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            self.kill()

    @property
    def is_alive(self) -> bool:
        """False once the cell was killed or has exited."""
        return self._host.fileno() >= 0 and self._process.poll() is None

    def end(self) -> None:
        """End an idle cell; kill it if it does not exit.

        A killed cell leaves its inner process to the machine's init, and the init of a container
        may never collect it.
        """
        self._host.close()
        try:
            self._process.wait(_CANCEL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the cell and everything in it."""
        _kill(self._process, self._host)


def _kill(process: subprocess.Popen[bytes], host: socket.socket) -> None:
    host.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _memory_file(content: bytes, *, flags: int = os.MFD_CLOEXEC) -> int:
    descriptor = os.memfd_create("cell", flags)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def sealed_file(content: bytes) -> int:
    """Descriptor of a memory file for an executable: a program that runs it cannot change it.

    Raises OSError if the machine forbids sealed files.
    """
    descriptor = _memory_file(content, flags=os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
