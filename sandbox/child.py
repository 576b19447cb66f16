"""The process that runs one program: locks itself down, runs the code, writes what came out as frames to the result file, and ends.

Nothing here is trusted once the program runs; it holds no expected output, so all a program can change is what it itself emits.
A frame is a line `<run> <kind> <nanoseconds of CPU> <body>`, kinds in `Kind`; the host reads them in order and believes none.
Forked by `zygote.py`; never returns.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import marshal
import math
import os
import resource
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

from . import linux, values
from .frames import Kind
from .preload import CALL_NAMES
from .protocol import FIRST_STREAM, PAYLOAD, RESULT, Mode, Request

if TYPE_CHECKING:
    from .zygote import Jail

_STACK_BYTES = 64 << 20
_MAX_DESCRIPTORS = 256
_MAX_TASKS = 64
_MESSAGE_CHARS = 300
_NO_MEMORY = b"MemoryError"


def main(request: Request, descriptors: list[int], jail: Jail) -> None:
    """Lock down, run, leave. The exit status is 0 unless the program chose another one."""
    code = 1
    try:
        size = os.fstat(descriptors[PAYLOAD]).st_size
        payload = marshal.loads(os.pread(descriptors[PAYLOAD], size, 0))
        try:
            _lock_down(request, descriptors, jail)
        except BaseException as error:
            jail.ready[1:257] = f"{type(error).__name__}: {error}".encode()[:256].ljust(256)
            raise
        if request.mode == Mode.CALLS:
            code = _Calls(descriptors[RESULT], request).run(*payload)
        elif request.mode == Mode.STREAMS:
            code = _Streams(descriptors[RESULT], request).run(payload, descriptors[FIRST_STREAM:])
    finally:
        os._exit(code)


def _lock_down(request: Request, descriptors: list[int], jail: Jail) -> None:
    keep = sorted({jail.ruleset, *descriptors[RESULT:], 2} - {-1})
    for low, high in zip(keep, [*keep[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)
    total_s = math.ceil(request.cpu_s * request.num_runs) + 2
    size = request.output_bytes + 1
    _limit(resource.RLIMIT_CPU, total_s)
    _limit(resource.RLIMIT_FSIZE, size)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    if jail.uid >= 0:
        os.setgroups([])
        os.setresgid(jail.uid, jail.uid, jail.uid)
        os.setresuid(jail.uid, jail.uid, jail.uid)
        linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    _limit(resource.RLIMIT_NPROC, _MAX_TASKS)
    _limit(resource.RLIMIT_AS, jail.base_address_space + request.memory_bytes)
    if jail.filter:
        linux.drop_capabilities()
        if jail.ruleset >= 0:
            linux.landlock_restrict(jail.ruleset)
            os.close(jail.ruleset)
        linux.install_seccomp(jail.filter)
    jail.ready[0] = 1
    jail.ready.close()


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _describe(error: BaseException) -> bytes:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = "an error that cannot be described"
    return json.dumps(text[:_MESSAGE_CHARS]).encode()


class _Runner:
    """Writes frames. It keeps its own references, so that a program that patches a module by accident still gets its verdict."""

    def __init__(self, result: int, request: Request) -> None:
        self._result, self._limit = result, request.output_bytes
        self._write, self._clock = os.write, time.process_time_ns

    def frame(self, run: int, kind: Kind, started: int, body: bytes) -> None:
        """One line; a body over the limit becomes an OUTPUT_LIMIT frame."""
        if len(body) > self._limit - 100:
            kind, body = Kind.TOO_LARGE, b"0"
        self._write(self._result, b"%d %s %d %s\n" % (run, kind.value, self._clock() - started, body))

    def compile(self, code: str) -> types.CodeType | None:
        """The program's code object; None after a COMPILE_ERROR frame."""
        started = self._clock()
        try:
            return compile(code, "solution.py", "exec", dont_inherit=True)
        except MemoryError:
            self.frame(-1, Kind.COMPILE_ERROR, started, b'"MemoryError: the parser gave up"')
        except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
            self.frame(-1, Kind.COMPILE_ERROR, started, _describe(error))
        return None

    def failure(self, run: int, started: int, error: BaseException) -> None:
        """The frame for an exception that left the program."""
        if isinstance(error, MemoryError):
            gc.collect()
            self.frame(run, Kind.MEMORY, started, b"0")
        elif isinstance(error, SystemExit):
            self.frame(run, Kind.EXIT, started, b"%d" % _exit_status(error))
        else:
            self.frame(run, Kind.ERROR, started, _describe(error))


def _exit_status(error: SystemExit) -> int:
    code = error.code
    return 0 if code is None else (code & 0xFF if type(code) is int else 1)


class _Calls(_Runner):
    """Load the code once, then make every call."""

    def run(self, code: str, calls: list[tuple[str, list[Any], dict[str, Any]]], stop: bool, has_call_names: bool) -> int:
        """One VALUE, ERROR, MEMORY, EXIT or TOO_LARGE frame per call, after LOADED."""
        compiled = self.compile(code)
        if compiled is None:
            return 0
        module = types.ModuleType("solution")
        namespace = module.__dict__
        if has_call_names:
            namespace.update(CALL_NAMES)
        sys.modules["solution"] = module
        started = self._clock()
        try:
            exec(compiled, namespace)
        except BaseException as error:
            self.failure(-1, started, error)
            return 0
        self.frame(-1, Kind.LOADED, started, b"0")
        for run, (name, args, keywords) in enumerate(calls):
            started = self._clock()
            try:
                body = values.encode(_callable(namespace, name)(*args, **keywords))
            except BaseException as error:
                self.failure(run, started, error)
                if stop:
                    return 0
            else:
                self.frame(run, Kind.VALUE, started, body)
        return 0


def _callable(namespace: dict[str, Any], name: str) -> Any:
    """The function, or the method of a fresh `Solution()`."""
    if name in namespace and (name not in CALL_NAMES or namespace[name] is not CALL_NAMES[name]):
        return namespace[name]
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


class _Streams(_Runner):
    """Run the code once per pair of standard input and output."""

    def run(self, code: str, streams: list[int]) -> int:
        """One DONE, ERROR, MEMORY or EXIT frame per run, after LOADED; the exit status is that of the last run."""
        compiled = self.compile(code)
        if compiled is None:
            return 0
        self.frame(-1, Kind.LOADED, self._clock(), b"0")
        for run in range(len(streams) // 2):
            started = self._clock()
            os.dup2(streams[2 * run], 0)
            os.dup2(streams[2 * run + 1], 1)
            os.close(streams[2 * run])
            os.close(streams[2 * run + 1])
            _open_streams()
            error = self._run_once(compiled)
            if error is None:
                self.frame(run, Kind.DONE, started, b"0")
            else:
                self.failure(run, started, error)
        return 0

    def _run_once(self, compiled: types.CodeType) -> BaseException | None:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        module.__dict__["__builtins__"] = __builtins__
        problem: BaseException | None = None
        try:
            exec(compiled, module.__dict__)
        except BaseException as error:
            problem = error
        try:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException as error:
            problem = problem or error
        return problem


def _open_streams() -> None:
    """sys.stdin and sys.stdout on descriptors 0 and 1; errors go where nobody reads."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="surrogateescape", newline="\n"
    )
    sys.argv = ["solution.py"]
