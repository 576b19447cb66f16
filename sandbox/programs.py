"""What a child does once it is locked down: run the program on calls or on streams, and write
frames of what came out.

Nothing here is trusted once the program runs; it holds no expected output, so all a program can
change is what it itself emits. Used by `child.py`; `Runner` and the helpers also by `judge.py`.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import sys
import threading
import time
import types
from typing import Any

from . import values
from .frames import Kind
from .preload import CALL_BUILTINS
from .protocol import Mode, Request

_MESSAGE_CHARS = 300


def describe(error: BaseException) -> bytes:
    """An exception as a JSON string, cut to a readable length."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001  the program's own __str__ may raise anything
        text = "an error that cannot be described"
    return json.dumps(text[:_MESSAGE_CHARS]).encode()


class Runner:
    """Writes frames. It keeps its own references, so that a program that patches a module by
    accident still gets its verdict.
    """

    def __init__(self, result: int, request: Request) -> None:
        self._result, self._limit = result, request.output_bytes
        self._write, self._clock = os.write, time.process_time_ns

    def now(self) -> int:
        """CPU time of this process in ns."""
        return self._clock()

    def frame(self, run: int, kind: Kind, started: int, body: bytes) -> None:
        """One line; a body over the limit becomes a TOO_LARGE frame. The clock may step back by
        microseconds in virtual machines.
        """
        if len(body) > self._limit - 100:
            kind, body = Kind.TOO_LARGE, b"0"
        self._write(
            self._result,
            b"%d %s %d %s\n" % (run, kind.value, max(0, self._clock() - started), body),
        )

    def compile(self, code: str) -> types.CodeType | None:
        """The program's code object; None after a COMPILE_ERROR frame."""
        started = self.now()
        try:
            return compile(code, "solution.py", "exec", dont_inherit=True)
        except MemoryError:
            self.frame(-1, Kind.COMPILE_ERROR, started, b'"MemoryError: the parser gave up"')
        except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
            self.frame(-1, Kind.COMPILE_ERROR, started, describe(error))
        return None

    def failure(self, run: int, started: int, error: BaseException) -> None:
        """The frame for an exception that left the program."""
        if isinstance(error, MemoryError):
            gc.collect()
            self.frame(run, Kind.MEMORY, started, b"0")
        elif isinstance(error, SystemExit):
            self.frame(run, Kind.EXIT, started, b"%d" % _exit_status(error))
        else:
            self.frame(run, Kind.ERROR, started, describe(error))


def _exit_status(error: SystemExit) -> int:
    code = error.code
    return 0 if code is None else (code & 0xFF if type(code) is int else 1)


def load_program(runner: Runner, code: str, *, has_call_names: bool) -> dict[str, Any] | None:
    """The namespace of the program once its body ran, after a LOADED frame; None after a frame that
    says why it did not.
    """
    compiled = runner.compile(code)
    if compiled is None:
        return None
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if has_call_names:
        module.__dict__["__builtins__"] = CALL_BUILTINS
    started = runner.now()
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:  # noqa: BLE001  whatever leaves the program is its answer
        runner.failure(-1, started, error)
        return None
    runner.frame(-1, Kind.LOADED, started, b"0")
    return module.__dict__


class Calls(Runner):
    """Load the code once, then make every call."""

    def run(
        self,
        code: str,
        calls: list[tuple[str, list[Any], dict[str, Any]]],
        stop: bool,
        has_call_names: bool,
    ) -> int:
        """One VALUE, ERROR, MEMORY, EXIT or TOO_LARGE frame per call, after LOADED."""
        namespace = load_program(self, code, has_call_names=has_call_names)
        if namespace is None:
            return 0
        for run, (name, args, keywords) in enumerate(calls):
            started = self._clock()
            try:
                body = values.encode(find_function(namespace, name)(*args, **keywords))
            except BaseException as error:  # noqa: BLE001  whatever leaves the program is its answer
                self.failure(run, started, error)
                if stop:
                    return 0
            else:
                self.frame(run, Kind.VALUE, started, body)
        return 0


def find_function(namespace: dict[str, Any], name: str) -> Any:
    """The function, or the method of a fresh `Solution()`."""
    if name in namespace:
        return namespace[name]
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


class Streams(Runner):
    """Run the code once per pair of standard input and output."""

    def run(self, code: str, streams: list[int]) -> int:
        """One DONE, ERROR, MEMORY or EXIT frame per run, after LOADED; the exit status is that of
        the last run.
        """
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
        except BaseException as error:  # noqa: BLE001  whatever leaves the program is its answer
            problem = error
        try:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException as error:  # noqa: BLE001  exit hooks are the program's too
            problem = problem or error
        return problem


def _open_streams() -> None:
    """sys.stdin and sys.stdout on descriptors 0 and 1; errors go where nobody reads."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8"
    )
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)),
        encoding="utf-8",
        errors="surrogateescape",
        newline="\n",
    )
    sys.argv = ["solution.py"]


_WARM = """
import math, re, sys
from typing import List
@__import__("dataclasses").dataclass
class A:
    x: int
def f(x: List[int]) -> list:
    return sorted(set(y * 2 for y in x if y > 1), key=lambda v: -v)
r = [f(list(range(9))), str(A(1)), re.sub("a", "b", "abc"), math.gcd(4, 6), f"{1.5:.2f}", {"a": [1, (2,)]}]
"""
_WARM_RUNS = 20


def warm_up() -> None:
    """Do in the zygote what its children will do, until the interpreter has specialised it: what is
    written there no child writes again.
    """
    request = Request(Mode.CALLS, 2, 1.0, 1.0, 1 << 20, 1 << 16)
    calls: list[Any] = [("f", [[1, 2, 3]], {}), ("f", [[]], {})]
    for _ in range(_WARM_RUNS):
        result = os.memfd_create("warm")
        Calls(result, request).run(_WARM, calls, True, True)
        os.close(result)
    del sys.modules["solution"]
