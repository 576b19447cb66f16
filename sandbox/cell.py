"""The host's end of one cell: starts it, hands it one job at a time, and ends it at the first
anomaly.

Takes a job; waits for the cell's reply; gives an `Outcome`, or raises `CellFailed`, after which the
cell is dead and is thrown away. Invariants: a cell dies with the thread that started it
(PR_SET_PDEATHSIG) and when its socket closes; memory files are always closed. Used by `pool.py`.
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
from typing import Any, NamedTuple

from .frames import Frames, read_frames
from .protocol import Hello, Mode, Reply, Request

_START_TIMEOUT_S = 30.0
_GRACE_S = 30.0
_CROWDED = 8
"""A machine may be so full that a program takes this many times its limits; after that its cell is
taken for broken.
"""
_MARSHAL_VERSION = 2
"""Writes no back references: arguments that are one object here arrive as several, so no call can
change what the next one gets.
"""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/tmp", "MALLOC_ARENA_MAX": "1", "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",  # a zygote with threads could not fork
    # symbols bound by a child would be bound, on pages of its own, by each child again
    "LD_BIND_NOW": "1",
}  # fmt: skip

_COMMAND = [
    os.path.realpath(sys.executable),
    "-s",
    "-P",
    "-S",
    "-B",
    str(Path(__file__).with_name("entry.py")),
]


class CellFailed(Exception):
    """The cell broke or did not answer: says nothing about the program."""


class Job(NamedTuple):
    """One program to run: limits, what its child is told (never an expected output), and one input
    per stream run.

    test: for Mode.JUDGE, setup and code of the test, seen by the judging child alone.
    """

    request: Request
    payload: tuple[Any, ...] | str
    inputs: Sequence[bytes] = ()
    test: tuple[str, str] | None = None


class Outcome(NamedTuple):
    """What came out of one child. outputs: bytes of each stream run, one byte over the limit if
    there was more.
    """

    reply: Reply
    frames: Frames
    is_result_full: bool
    outputs: list[bytes]


class Cell:
    """One cell. Not for use by two jobs at a time."""

    def __init__(self, process: subprocess.Popen[bytes], host: socket.socket) -> None:
        self._process, self._host = process, host
        self.hello: Hello | None = None

    @classmethod
    async def start(
        cls, level: int, readable: Sequence[str], packages: Mapping[str, str] | None = None
    ) -> Cell:
        """A cell at the given level. Raises CellFailed with the cell's own words if it cannot be
        had.

        readable: directories it must see besides the system's; packages: names to import, and the
        directory to import each from.
        """
        named = [f"{name}={folder}" for name, folder in (packages or {}).items()]
        host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.setblocking(False)
        words = os.memfd_create("cell-stderr")
        try:
            process = subprocess.Popen(  # noqa: ASYNC220  a few ms, and PR_SET_PDEATHSIG wants this thread
                [*_COMMAND, str(level), str(os.getpid()), str(inside.fileno()), *named, *readable],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words, env=_ENVIRONMENT, cwd="/",
                pass_fds=(inside.fileno(),), start_new_session=True,
            )  # fmt: skip
            inside.close()
            cell = cls(process, host)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    data = await asyncio.get_running_loop().sock_recv(host, 4096)
                if not data:
                    raise CellFailed("it ended")
            except (OSError, TimeoutError, CellFailed) as error:
                cell.kill()
                said = os.pread(words, 4000, 0).decode(errors="replace").strip().splitlines()
                raise CellFailed(
                    f"a cell at level {level} did not start: {said[-1] if said else error}"
                ) from error
            except BaseException:
                cell.kill()
                raise
        finally:
            os.close(words)
        cell.hello = Hello.unpack(data)
        return cell

    @property
    def pid(self) -> int:
        """Process id of the cell's outermost process."""
        return self._process.pid

    async def run(self, job: Job) -> Outcome:
        """Run one child. Cancelling ends the child, or the cell if it does not answer. Raises
        CellFailed.
        """
        files: list[int] = []
        try:
            files.append(_memory_file("payload", marshal.dumps(job.payload, _MARSHAL_VERSION)))
            files.append(_memory_file("result", b""))
            if job.test is not None:
                files.append(_memory_file("test", marshal.dumps(job.test, _MARSHAL_VERSION)))
            for data in job.inputs:
                files.append(_memory_file("stdin", data))
                files.append(_memory_file("stdout", b""))
            reply = await self._exchange(job.request, files)
            limit = job.request.output_bytes + 1
            result = _read(files[1], limit)
            outputs = [_read(fd, limit) for fd in files[3::2]] if job.inputs else []
            return Outcome(reply, read_frames(result), len(result) >= limit, outputs)
        finally:
            for fd in files:
                os.close(fd)

    async def _exchange(self, request: Request, files: list[int]) -> Reply:
        longest = _CROWDED * (request.cpu_s + request.sleep_s) * request.num_runs + _GRACE_S
        try:
            socket.send_fds(self._host, [request.pack()], files)
            try:
                async with asyncio.timeout(longest):
                    data = await asyncio.get_running_loop().sock_recv(self._host, 512)
            except asyncio.CancelledError:
                await self._cancel()
                raise
            reply = Reply.unpack(data)
        except (OSError, TimeoutError, ValueError) as error:
            self.kill()
            raise CellFailed(
                f"cell {self.pid} failed in a job: {error or type(error).__name__}"
            ) from error
        except BaseException:
            if self._host.fileno() < 0:
                self.kill()
            raise
        return reply

    async def _cancel(self) -> None:
        """End the child of the running job and take its reply off the socket; a cell that does not
        answer at once is killed.
        """
        try:
            self._host.send(b"cancel")
            async with asyncio.timeout(1.0):
                Reply.unpack(await asyncio.get_running_loop().sock_recv(self._host, 512))
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            self.kill()

    @property
    def is_alive(self) -> bool:
        """False once killed or ended."""
        return self._host.fileno() >= 0 and self._process.poll() is None

    def kill(self) -> None:
        """End the cell and everything in it, now."""
        self._host.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def job_request(
    mode: Mode, num_runs: int, *, cpu_s: float, memory_bytes: int, output_bytes: int
) -> Request:
    """Limits of a job; a run may sleep a second longer than it may compute."""
    return Request(int(mode), num_runs, cpu_s, cpu_s + 1, memory_bytes, output_bytes)


def _memory_file(name: str, data: bytes) -> int:
    fd = os.memfd_create(name)
    if data:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read(fd: int, limit: int) -> bytes:
    return os.pread(fd, limit, 0)
