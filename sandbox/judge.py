"""Tests that cannot be taken apart: the test runs in one child, the program in another, and only
plain values pass between them.

`Solver` loads the program and answers calls. `Test` executes the test's code, in which every name
that the test does not define is a proxy that asks the solver. Both are locked down like any child.
The solver receives one call at a time and nothing else; it has neither the test's code nor the
result file. The test side reads from the solver what may be hostile, and only through
`values.decode`.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from . import values
from .frames import Frame, Kind, read_frame
from .programs import Runner, describe, find_function, load_program
from .protocol import JobSpec

_MAX_REQUEST_BYTES = 1 << 30
_FRAME_OVERHEAD_BYTES = 200
_OFFERED = frozenset(
    (
        "sys",
        "math",
        "re",
        "collections",
        "itertools",
        "functools",
        "string",
        "random",
        "operator",
        "copy",
        "json",
    )
)
"""Modules that a test may use without importing them."""


class Solver(Runner):
    """Loads the program, then answers each request line with one frame."""

    def __init__(self, result: int, spec: JobSpec, requests: int) -> None:
        super().__init__(result, spec)
        self._requests = requests

    def run(self, code: str) -> int:
        """Answer until the test side closes its end of the requests."""
        namespace = load_program(self, code, has_call_names=False)
        if namespace is None:
            return 0
        for run, line in enumerate(_lines(self._requests, _MAX_REQUEST_BYTES)):
            started = self.now()
            try:
                name, args, keywords = values.decode(line)
                body = values.encode(find_function(namespace, name)(*args, **keywords))
            except BaseException as error:  # noqa: BLE001  anything the program raises is an answer
                self.failure(run, started, error)
            else:
                self.frame(run, Kind.VALUE, started, body)
        return 0


class ProgramFailed(BaseException):
    """The program could not answer.

    Not an Exception, because `except Exception` in a test must not swallow it.
    """

    def __init__(self, kind: Kind, body: bytes) -> None:
        super().__init__(kind, body)
        self.kind, self.body = kind, body


class Test(Runner):
    """Runs the test.

    Result: LOADED, then DONE if the test passed, VALUE with a message if it failed, or the frame of
    the solver's own failure.
    """

    def __init__(self, result: int, spec: JobSpec, requests: int, answers: int) -> None:
        super().__init__(result, spec)
        self._requests = requests
        self._answers = _lines(answers, spec.output_bytes)
        self._num_asked = 0

    def run(self, setup: str, test: str) -> int:
        """Write the verdict as the frame of run 0.

        A program that does not load has its own frame for run -1 instead.
        """
        started = self.now()
        loaded = self._answer(-1)
        if loaded.kind is not Kind.LOADED:
            self.frame(-1, loaded.kind, started, loaded.body)
            return 0
        self.frame(-1, Kind.LOADED, started, b"0")
        started = self.now()
        kind, body = Kind.DONE, b"0"
        try:
            self._execute(setup, test)
        except ProgramFailed as failed:
            kind, body = failed.kind, failed.body
        except BaseException as error:  # noqa: BLE001  a test that raises has failed
            cause = error.__cause__
            if isinstance(cause, ProgramFailed):
                kind, body = cause.kind, cause.body
            else:
                kind, body = Kind.VALUE, describe(error)
        self.frame(0, kind, started, body)
        return 0

    def _execute(self, setup: str, test: str) -> None:
        namespace: dict[str, Any] = {"__name__": "test"}
        codes = [
            compile(source, name, "exec", dont_inherit=True)
            for source, name in ((setup, "setup"), (test, "test"))
        ]
        for code in codes:
            for name in _names(code):
                if name in vars(builtins) or name in namespace:
                    continue
                if name in _OFFERED and name in sys.modules:
                    namespace[name] = sys.modules[name]
                else:
                    namespace[name] = self._proxy(name)
        for code in codes:
            exec(code, namespace)

    def _proxy(self, name: str) -> Any:
        def ask(*args: Any, **keywords: Any) -> Any:
            request = values.encode((name, list(args), keywords))
            if b'{"o":' in request:
                raise TypeError(
                    f"{name} was given a value that cannot be passed to another process"
                )
            os.write(self._requests, request + b"\n")
            self._num_asked += 1
            return _value(self._answer(self._num_asked - 1))

        ask.__name__ = name
        return ask

    def _answer(self, run: int) -> Frame:
        line = next(self._answers, None)
        frame = read_frame(line, run) if line is not None else None
        if frame is None:
            raise ProgramFailed(
                Kind.ERROR, b'"the program ended the process, or its answer was malformed"'
            )
        return frame


def _value(frame: Frame) -> Any:
    if frame.kind is Kind.VALUE:
        try:
            return unwrapped(values.decode(frame.body))
        except ValueError:
            raise ProgramFailed(Kind.ERROR, b'"the returned value is malformed"') from None
    if frame.kind is Kind.ERROR:
        _raise_like(frame)
    raise ProgramFailed(frame.kind, frame.body)


def unwrapped(value: Any) -> Any:
    """The value with instances of subclasses of plain types replaced by plain values, at any depth.

    Other foreign values stay.
    """
    kind = type(value)
    if kind is values.Foreign:
        inner = unwrapped(value.value)
        if value.kind == "subclass":
            return inner
        return values.Foreign(value.kind, value.type_name, inner)
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return kind(map(unwrapped, value))
    if kind is dict:
        return {unwrapped(key): unwrapped(item) for key, item in value.items()}
    return value


def _raise_like(frame: Frame) -> NoReturn:
    """Raise the builtin exception that the program raised, because a test may catch it.

    Raises ProgramFailed for any other exception, and for AssertionError, which only a test may
    raise.
    """
    failed = ProgramFailed(frame.kind, frame.body)
    text = values.decode(frame.body) if frame.body.startswith(b'"') else ""
    name, _, message = text.partition(": ")
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            error = kind(message)
        except TypeError:
            raise failed from None
        raise error from failed
    raise failed


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _lines(descriptor: int, longest: int) -> Iterator[bytes]:
    """Lines from a pipe, without their ends; stops at the pipe's end or at a line that is too long.

    Written by hand, because a buffered reader would accept a line of any length.
    """
    rest = b""
    while True:
        line, separator, after = rest.partition(b"\n")
        if separator:
            rest = after
            yield line
            continue
        if len(rest) > longest + _FRAME_OVERHEAD_BYTES:
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        rest += data
