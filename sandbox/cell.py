"""The host's end of one cell: starts it, sends it one job at a time, and ends it at any anomaly.

Takes a job, waits for the cell's reply, and returns an `Outcome`, or raises `CellFailed`; the cell
is then dead and is thrown away. Invariants: a cell dies with the thread that started it
(PR_SET_PDEATHSIG) and when its socket closes; memory files are always closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from .frames import Frames, read_frames
from .protocol import Hello, JobSpec, Mode, Reply, TestCode

_START_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 1.0
_GRACE_S = 30.0
_CROWDED = 8
"""A busy machine may delay a program by this factor; a cell that needs longer counts as broken."""
_MARSHAL_VERSION = 2
"""This version writes no back references. Arguments that are one object here arrive as several, so
a call cannot change the arguments of the next call.
"""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/tmp",
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


class Job(NamedTuple):
    """One program to run: limits, the payload of its child, and one input per stream run.

    payload: arguments of the child's part; that of a program never contains an expected output.
    test: for Mode.JUDGE; only the judging child can read it. files: of Mode.CHECK.
    """

    spec: JobSpec
    payload: tuple[Any, ...]
    inputs: Sequence[bytes] = ()
    test: TestCode | None = None
    files: Sequence[bytes] = ()


class Outcome(NamedTuple):
    """The output of one child.

    outputs: bytes of each stream run; one byte more than the limit if the program wrote more.
    """

    reply: Reply
    frames: Frames
    is_result_full: bool
    outputs: list[bytes]


class Cell:
    """One cell. It runs one job at a time. zygote: the module that runs inside."""

    zygote: ClassVar = "zygote"

    def __init__(self, process: subprocess.Popen[bytes], host: socket.socket, hello: Hello) -> None:
        self._process, self._host = process, host
        self.hello = hello

    @classmethod
    async def start(
        cls, level: int, readable: Sequence[str], packages: Mapping[str, str] | None = None
    ) -> Self:
        """Start a cell at the given level. Raises CellFailed with the last line of its stderr.

        readable: directories that it must see besides the system's; packages: names to import, and
        the directory to import each from.
        """
        named = [f"{name}={folder}" for name, folder in (packages or {}).items()]
        host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.setblocking(False)
        arguments = [str(level), str(os.getpid()), str(inside.fileno()), *named, *readable]
        stderr = os.memfd_create("cell-stderr")
        try:
            # Not in a thread: PR_SET_PDEATHSIG ties the cell to the thread that starts it.
            process = subprocess.Popen(  # noqa: ASYNC220  takes a few ms
                [*_COMMAND, _ENTRY, cls.zygote, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(inside.fileno(),),
                start_new_session=True,
            )
            inside.close()
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    data = await asyncio.get_running_loop().sock_recv(host, 4096)
                if not data:
                    raise CellFailed("it ended")
                return cls(process, host, Hello.unpack(data))
            except (OSError, TimeoutError, CellFailed) as error:
                _kill(process, host)
                lines = read_file(stderr, 4000).decode(errors="replace").strip().splitlines()
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

    async def run(self, job: Job) -> Outcome:
        """Run one child. Raises CellFailed.

        Cancelling ends the child, or the cell if it does not answer.
        """
        files: list[int] = []
        try:
            files.append(memory_file("payload", marshal.dumps(job.payload, _MARSHAL_VERSION)))
            files.append(memory_file("result", b""))
            if job.test is not None:
                files.append(memory_file("test", marshal.dumps(tuple(job.test), _MARSHAL_VERSION)))
            files += [memory_file("file", data) for data in job.files]
            for data in job.inputs:
                files.append(memory_file("stdin", data))
                files.append(memory_file("stdout", b""))
            longest_s = _CROWDED * (job.spec.cpu_s + job.spec.sleep_s) + _GRACE_S
            reply = await self._exchange(job.spec.pack(), files, longest_s)
            limit = job.spec.output_bytes + 1
            result = read_file(files[1], limit)
            outputs = [read_file(fd, limit) for fd in files[3::2]] if job.inputs else []
            return Outcome(reply, read_frames(result), len(result) >= limit, outputs)
        finally:
            for fd in files:
                os.close(fd)

    async def _exchange(self, spec: bytes, files: list[int], longest_s: float) -> Reply:
        try:
            socket.send_fds(self._host, [spec], files)
            return await self._reply(longest_s)
        except asyncio.CancelledError:
            await self._cancel()
            raise
        except (OSError, TimeoutError, ValueError) as error:
            self.kill()
            raise CellFailed(
                f"cell {self.pid} failed in a job: {error or type(error).__name__}"
            ) from error

    async def _reply(self, longest_s: float) -> Reply:
        async with asyncio.timeout(longest_s):
            return Reply.unpack(await asyncio.get_running_loop().sock_recv(self._host, 512))

    async def _cancel(self) -> None:
        """End the child of the running job and read its reply; kill a cell that does not answer."""
        try:
            self._host.send(b"cancel")
            await self._reply(_CANCEL_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            self.kill()

    @property
    def is_alive(self) -> bool:
        """False once killed or ended."""
        return self._host.fileno() >= 0 and self._process.poll() is None

    def end(self) -> None:
        """End an idle cell; kill it if it does not end.

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


def job_spec(
    mode: Mode,
    num_runs: int,
    *,
    cpu_s: float,
    memory_bytes: int,
    output_bytes: int,
    num_tests: int = 1,
) -> JobSpec:
    """Mode and limits of a job, which may sleep one second longer than it may compute."""
    return JobSpec(int(mode), num_runs, cpu_s, cpu_s + 1, memory_bytes, output_bytes, num_tests)


def _kill(process: subprocess.Popen[bytes], host: socket.socket) -> None:
    host.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def memory_file(name: str, data: bytes) -> int:
    """Descriptor of a new memory file with this content."""
    fd = os.memfd_create(name)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_file(fd: int, limit: int) -> bytes:
    """The first bytes of a file."""
    return os.pread(fd, limit, 0)
