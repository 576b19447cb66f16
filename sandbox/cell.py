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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from .protocol import (
    FIRST_STREAM,
    JOBS,
    PRODUCT,
    RESULT,
    SLEEP_S,
    STDERR,
    STDERR_BYTES,
    STDIN,
    STDOUT,
    CommandSpec,
    JobSpec,
    Mode,
    Reply,
)

# A thousand times the usual start: with numpy it takes 60 ms, on a crowded machine seconds.
_START_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 1.0
_MAX_REPLY_BYTES = 4096
# A busy machine may delay work by this factor and these seconds; a cell that needs longer counts
# as broken.
_CROWDED = 8
_GRACE_S = 60.0
# More than a compiled program may have, so that the caller can tell that one is too large.
_MAX_PRODUCT_BYTES = 1 << 28
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
_ENTRY = str(Path(__file__).with_name("entry.py"))


class CellFailed(Exception):
    """The cell broke or did not answer, or its child never ran the program, or was killed from
    outside. This says nothing about the program.
    """


def interpreter_paths() -> list[str]:
    """Directories that a cell must read to run Python, with links resolved."""
    # A virtual environment links to its base, whose library it reads.
    paths = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    return sorted(paths - {"/", "/usr"})


def entry(module: str, *arguments: Any) -> list[str]:
    """The command line of a fresh interpreter that runs the `main` of a module of this package."""
    interpreter = os.path.realpath(sys.executable)
    return [interpreter, "-s", "-P", "-S", "-B", _ENTRY, json.dumps([module, *arguments])]


def packed(arguments: tuple[Any, ...]) -> bytes:
    """The arguments of a child's part."""
    # This version writes no back references. Arguments that are one object here arrive as several,
    # so a call cannot change the arguments of the next call.
    return marshal.dumps(arguments, 2)


class Executable:
    """A memory file that a program runs and cannot change. It is closed with its last reference.

    Raises OSError if the machine forbids sealed files.
    """

    def __init__(self, content: bytes) -> None:
        self._file = _memory_file(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)

    def fileno(self) -> int:
        """The descriptor."""
        return self._file.fileno()

    def __del__(self) -> None:
        self._file.close()


class Work(NamedTuple):
    """One job or one command for a cell.

    files: the contents of its memory files, or ends of pipes; read: the number of each file whose
    content is returned, and the most bytes of it.
    """

    spec: JobSpec | CommandSpec
    files: Sequence[bytes | Executable | IO[bytes]]
    read: Sequence[tuple[int, int]]

    def joined(self, stdin: IO[bytes], stdout: IO[bytes], peer: Cell) -> Work:
        """The work with ends of pipes as standard streams. peer: the cell at their other ends."""
        first = FIRST_STREAM if isinstance(self.spec, JobSpec) else STDIN
        files = [*self.files[:first], stdin, stdout, *self.files[first + 2 :]]
        return self._replace(spec=self.spec._replace(peer=peer._number), files=files)


class Outcome(NamedTuple):
    """The reply, and the contents of the files of `Work.read`."""

    reply: Reply
    contents: list[bytes]


def job(spec: JobSpec, payload: tuple[Any, ...], more: Sequence[bytes] = ()) -> Work:
    """One Python program to run. The outcome has the result file, then the output of each stream;
    each has one byte more than the limit if the program wrote more.

    payload: arguments of the child's part; a program's payload never contains an expected output.
    more: input and output of each stream run; the tests, packed, which only the judging child can
    read; or standard input and output of a checker, then input and answer of its test.
    """
    files = [packed(payload), b"", *more]
    outputs = range(FIRST_STREAM + 1, len(files), 2) if spec.mode == Mode.STREAMS else ()
    return Work(spec, files, [(number, spec.output_bytes + 1) for number in (RESULT, *outputs)])


def command(
    spec: CommandSpec, stdin: bytes, contents: Sequence[bytes | Executable], output_bytes: int
) -> Work:
    """One command to run. The outcome has standard output, the start of standard error, and
    the product.

    contents: the executable if the spec has no path, then the files that the spec names;
    output_bytes: of standard output that are returned.
    """
    read = [(STDOUT, output_bytes), (STDERR, STDERR_BYTES), (PRODUCT, _MAX_PRODUCT_BYTES)]
    return Work(spec, [stdin, b"", b"", b"", *contents], read)


class Cell:
    """One cell. pid: of its outermost process."""

    def __init__(self, process: subprocess.Popen[bytes], host: socket.socket) -> None:
        self._process = process
        self.pid = process.pid
        self.host = host
        # Of the process that forks its programs.
        self._number = 0

    @classmethod
    async def start(
        cls,
        level: int,
        readable: Sequence[str],
        packages: Mapping[str, str] = {},
        *,
        kind: str = JOBS,
    ) -> Cell:
        """Start a cell at the given level. Raises CellFailed with the last line of its stderr.

        readable: directories that it must see besides the system's and the interpreter's; packages:
        names to import, and the directory to import each from.
        """
        host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.setblocking(False)
        paths = [*interpreter_paths(), *readable]
        given = (kind, level, os.getpid(), inside.fileno(), packages, paths)
        # A file, not a pipe: nobody would read it while the cell starts, and a full pipe would stop
        # it.
        stderr = os.memfd_create("cell-stderr")
        try:
            # Not in a thread: PR_SET_PDEATHSIG ties the cell to the thread that starts it.
            process = subprocess.Popen(  # noqa: ASYNC220  takes a few ms
                entry("zygote", *given),
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
            cell = cls(process, host)
            try:
                (cell._number,) = await cell._received(_START_TIMEOUT_S)
                return cell
            except BaseException as error:
                cell.kill()
                if not isinstance(error, OSError | TimeoutError | ValueError):
                    raise
                lines = os.pread(stderr, 4000, 0).decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else "it exited, or did not answer"
                raise CellFailed(f"a cell at level {level} did not start: {reason}") from error
        finally:
            os.close(stderr)

    async def run(self, work: Work) -> Outcome:
        """Run one piece of work. Raises CellFailed.

        Cancelling stops the work, or kills the cell if it does not answer.
        """
        files: list[int] = []
        with contextlib.ExitStack() as own:
            for content in work.files:
                if isinstance(content, bytes):
                    content = own.enter_context(_memory_file(content))
                files.append(content.fileno())
            # The cell enforces the limits; this one is for a cell that hangs.
            longest_s = _CROWDED * (2 * work.spec.cpu_s + SLEEP_S) + _GRACE_S
            try:
                socket.send_fds(self.host, [json.dumps(work.spec).encode()], files)
                reply = Reply(*await self._received(longest_s))
            except asyncio.CancelledError:
                await self._cancel()
                raise
            except (OSError, TimeoutError, TypeError, ValueError) as error:
                self.kill()
                raise CellFailed(
                    f"cell {self.pid} failed in a job: {error or type(error).__name__}"
                ) from error
            contents = [
                os.pread(files[number], most, 0) if work.files[number] == b"" else b""
                for number, most in work.read
            ]
            return Outcome(reply, contents)

    async def _received(self, longest_s: float) -> list[Any]:
        """The fields of the next message. Raises ValueError if the cell has exited."""
        async with asyncio.timeout(longest_s):
            data = await asyncio.get_running_loop().sock_recv(self.host, _MAX_REPLY_BYTES)
        fields: list[Any] = json.loads(data)
        return fields

    async def _cancel(self) -> None:
        """End the running work; kill a cell that does not answer."""
        try:
            # Without descriptors, so that the zygote can tell it from a job.
            self.host.send(b"cancel")
            # The reply of the job, unless it was lost with the cancelled wait for it: the next job
            # would take it for its own.
            while await self._received(_CANCEL_TIMEOUT_S):
                pass
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            self.kill()

    @property
    def is_alive(self) -> bool:
        """False once the cell was killed or has exited."""
        return self.host.fileno() >= 0 and self._process.poll() is None

    def end(self) -> None:
        """End an idle cell; kill it if it does not exit.

        A killed cell leaves its inner process to the machine's init, and the init of a container
        may never collect it.
        """
        self.host.close()
        try:
            self._process.wait(_CANCEL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the cell and everything in it."""
        self.host.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The ends of a pipe: for reading, for writing."""
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as first, open(writing, "wb", 0) as last:
        yield first, last


def _memory_file(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("cell", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    return file
