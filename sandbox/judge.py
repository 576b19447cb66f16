"""Tests that cannot be taken apart: the test runs in one child, the program in another, and only
plain values pass between them.

`Solver` loads the program and answers calls. `Test` executes the test's code, in which the names
that neither the test nor Python defines are proxies that call the solver. Both are locked down like
any child. The solver receives one call at a time and nothing else; it has neither the test's code
nor the result file. Invariants: the test side treats every answer of the solver as hostile, accepts
only the kinds of frames that a solver writes, and decodes only through `values.decode`; a passed
test has called the solver at least once; a solver that could not answer fails the test even if the
test catches the exception.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import values
from .programs import Runner, answer, describe, load_program
from .protocol import Frame, JobSpec, Kind, TestCode, read_frame

# The test is trusted: its own memory limit is lower.
_MAX_REQUEST_BYTES = 1 << 30
_FRAME_OVERHEAD_BYTES = 200
_ANSWERS = frozenset({Kind.VALUE, Kind.ERROR, Kind.EXIT, Kind.MEMORY, Kind.TOO_LARGE})
# Exceptions of the program that fail the test. A test raises an AssertionError itself; a
# NameError means that the program has no such function; StopIteration and its async form would
# end a loop of the test early, and `all(map(...))` would hold.
_FATAL = frozenset({"AssertionError", "NameError", "StopIteration", "StopAsyncIteration"})


class Solver(Runner):
    """Loads the program, then answers each line of requests, its only file, with one frame."""

    def run(self, code: str) -> int:
        """Answer until the test side closes its end of the requests."""
        namespace = load_program(self, code, has_call_names=False)
        if namespace is None:
            return 0
        (requests,) = self._files
        for run, line in enumerate(_lines(requests, _MAX_REQUEST_BYTES)):
            answer(self, namespace, run, line)
        return 0


class ProgramFailed(BaseException):
    """The test cannot continue. Not an Exception: a test's `except Exception` must not catch it."""


class Test(Runner):
    """Runs the test.

    Result: LOADED, then PASSED, FAILED or BROKEN_TEST, or the frame of the solver's own failure.
    """

    __test__ = False

    def __init__(self, result: int, spec: JobSpec, files: Sequence[int]) -> None:
        super().__init__(result, spec)
        self._requests, answers = files
        self._answers = _lines(answers, spec.output_bytes)
        self._num_asked, self._has_text = 0, False
        self._settled: tuple[Kind, bytes] | None = None

    def run(self, *fields: Any) -> int:
        """Write the verdict of a TestCode as the frame of run 0.

        A program that does not load has its own frame for run -1 instead.
        """
        started = self.now()
        loaded = self._answer(-1)
        # A solver may not decide: it could write PASSED, or a broken test that never counts.
        if loaded.kind not in (Kind.LOADED, Kind.COMPILE_ERROR, *(_ANSWERS - {Kind.VALUE})):
            loaded = loaded._replace(kind=Kind.ERROR, body=b'"its answer is malformed"')
        self.frame(-1, loaded.kind, started, loaded.body)
        if loaded.kind is Kind.LOADED:
            started = self.now()
            kind, body = self._ruling(TestCode(*fields))
            self.frame(0, kind, started, body)
        return 0

    def _ruling(self, test: TestCode) -> tuple[Kind, bytes]:
        problem: BaseException | None = None
        try:
            self._execute(test)
        except BaseException as error:  # noqa: BLE001  a test that raises has failed
            problem = error
        # Before everything: the test may have caught the exception and gone on.
        if self._settled is not None:
            return self._settled
        if problem is None and self._num_asked:
            return Kind.PASSED, b"0"
        if problem is None:
            return Kind.BROKEN_TEST, b'"the test ended without a call of the program"'
        if isinstance(problem.__cause__, _Raised):
            return Kind.ERROR, problem.__cause__.body
        source = test.setup + test.code
        # A text may be evaluated, and a test may continue after an exception without its value.
        is_own_fault = isinstance(problem, ImportError | SyntaxError | NameError)
        if is_own_fault and self._has_text:
            is_own_fault = isinstance(problem, ImportError) and str(problem.name) in source
        if is_own_fault or not self._num_asked:
            return Kind.BROKEN_TEST, describe(problem)
        return Kind.FAILED, describe(problem)

    def _execute(self, test: TestCode) -> None:
        namespace: dict[str, Any] = {"__name__": "test"}
        sources = {"imports": test.imports, "setup": test.setup, "test": test.code}
        imports, setup, code = (
            compile(source, name, "exec", dont_inherit=True) for name, source in sources.items()
        )
        # For `from solution import f`, which tests of some data sets have.
        solution = types.ModuleType("solution")
        solution.__dict__.update(__getattr__=self._proxy, __all__=[])
        sys.modules["solution"] = solution
        exec(imports, namespace)
        proxies = {name: self._proxy(name) for name in test.free}
        namespace.update(proxies)
        exec(setup, namespace)
        if all(namespace[name] is not proxy for name, proxy in proxies.items()):
            namespace.update({name: self._proxy(name) for name in test.tested})
        if "unittest" in test.code:
            # It would run the tests of __main__ and leave; they are run below.
            importlib.import_module("unittest").main = lambda *_, **__: None  # type: ignore[attr-defined]
        exec(code, namespace)
        for case in list(_cases(namespace)):
            case()

    def _proxy(self, name: str) -> Any:
        # The import system looks for such names in a module.
        if name.startswith("__"):
            raise AttributeError(name)

        def ask(*args: Any, **keywords: Any) -> Any:
            request = values.encode((name, list(args), keywords))
            if b'{"o":' in request:
                # The program chose the value that it returned and that the test passes to it again.
                kind = Kind.ERROR if b'{"o":"Foreign"}' in request else Kind.BROKEN_TEST
                reason = f'"{name} gets a value that cannot be passed to another process"'
                self._settle(kind, reason.encode())
            self._num_asked += 1
            try:
                os.write(self._requests, request + b"\n")
            except OSError:
                self._settle(Kind.ERROR, b'"the program ended the process"')
            return self._value(self._answer(self._num_asked - 1))

        ask.__name__ = name
        return ask

    def _settle(self, kind: Kind, body: bytes) -> NoReturn:
        """Fix the result, whatever the test does with the exception."""
        self._settled = self._settled or (kind, body)
        raise ProgramFailed(kind, body)

    def _answer(self, run: int) -> Frame:
        line = next(self._answers, None)
        frame = read_frame(line, run) if line is not None else None
        if frame is None:
            reason = b'"the program ended the process, or its answer was malformed"'
            if run < 0:
                return Frame(run, Kind.ERROR, 0.0, reason)
            self._settle(Kind.ERROR, reason)
        return frame

    def _value(self, frame: Frame) -> Any:
        if frame.kind not in _ANSWERS:
            self._settle(Kind.ERROR, b'"the program sent a frame that is not an answer"')
        if frame.kind not in (Kind.VALUE, Kind.ERROR):
            self._settle(frame.kind, frame.body)
        # A test may evaluate a text, and its ImportError would then be the doing of the program.
        self._has_text |= b'"' in frame.body
        try:
            value = values.decode(frame.body)
        except ValueError:
            self._settle(Kind.ERROR, b'"the returned value is malformed"')
        except MemoryError:
            self._settle(Kind.MEMORY, b"0")
        if frame.kind is Kind.VALUE:
            return values.unwrapped(value)
        name, _, message = str(value).partition(": ")
        if name in _FATAL:
            self._settle(Kind.ERROR, frame.body)
        kind = vars(builtins).get(name)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = Exception
        try:
            error = kind(message)
        except TypeError:
            # Some exceptions take more arguments, such as UnicodeDecodeError.
            error = Exception(message)
        raise error from _Raised(frame.body)


class _Raised(Exception):
    """Marks an exception as the program's."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


def _cases(namespace: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Functions and classes of tests that the code defines in the forms of pytest and unittest."""
    for name, value in namespace.items():
        if isinstance(value, types.FunctionType):
            code = value.__code__
            num_required = code.co_argcount - len(value.__defaults__ or ())
            if name.startswith("test") and code.co_filename == "test" and not num_required:
                yield value
        elif isinstance(value, type) and value.__module__ == "test":
            if "unittest" in sys.modules and issubclass(value, sys.modules["unittest"].TestCase):
                yield sys.modules["unittest"].TestLoader().loadTestsFromTestCase(value).debug
            elif name.startswith("Test"):
                methods = [method for method in dir(value) if method.startswith("test")]
                yield from (getattr(value(), method) for method in methods)


def _lines(descriptor: int, longest: int) -> Iterator[bytes]:
    """Lines from a pipe, without line breaks; stops at the pipe's end or at a line that is too
    long.

    Written by hand, because a buffered reader would accept a line of any length.
    """
    rest = bytearray()
    while len(rest) <= longest + _FRAME_OVERHEAD_BYTES:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *ends, data = data.split(b"\n")
        for end in ends:
            yield bytes(rest + end)
            rest.clear()
        rest += data
