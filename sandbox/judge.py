"""Tests that cannot be taken apart: the test runs in one child, the program in another, and only
plain values pass between them.

`Solver` loads the program and answers calls; `Test` executes the test's code, in which every name
that the test does not define itself is a proxy that asks the solver.  Both are locked down like any
child.  The solver sees calls one at a time and nothing else; it holds neither the test's code nor
the result file.  What the test side reads from the solver is hostile and goes through
`values.decode`. Forked by `zygote.py` through `child.py`.
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
from .protocol import Request

_NAMES_TRIED = 10_000


class Solver(Runner):
    """Loads the program, then answers one request line with one frame until the test side closes
    its end.
    """

    def __init__(self, result: int, request: Request, requests: int) -> None:
        super().__init__(result, request)
        self._requests = requests

    def run(self, code: str) -> int:
        """Ends with the end of the requests."""
        namespace = load_program(self, code, has_call_names=False)
        if namespace is None:
            return 0
        for run, line in enumerate(_lines(self._requests, 1 << 30)):
            started = self.now()
            try:
                name, args, keywords = values.decode(line)
                body = values.encode(find_function(namespace, name)(*args, **keywords))
            except BaseException as error:  # noqa: BLE001  whatever leaves the program is an answer
                self.failure(run, started, error)
            else:
                self.frame(run, Kind.VALUE, started, body)
        return 0


class ProgramFailed(BaseException):
    """The program could not answer; no `except Exception` in a test may swallow it."""

    def __init__(self, kind: Kind, body: bytes) -> None:
        super().__init__(kind, body)
        self.kind, self.body = kind, body


class Test(Runner):
    """Runs the test. Result: LOADED, then DONE if it held, VALUE with a message if it did not, or
    the solver's own failure.
    """

    def __init__(self, result: int, request: Request, requests: int, answers: int) -> None:
        super().__init__(result, request)
        self._requests = requests
        self._answers = _lines(answers, request.output_bytes)
        self._num_asked = 0

    def run(self, setup: str, test: str) -> int:
        """The verdict is the frame of run 0; a program that does not load has its own frame for run
        -1.
        """
        started = self.now()
        loaded = self._answer(-1)
        if loaded.kind is not Kind.LOADED:
            self.frame(-1, loaded.kind, started, loaded.body)
            return 0
        self.frame(-1, Kind.LOADED, started, b"0")
        started = self.now()
        try:
            self._execute(setup, test)
        except ProgramFailed as failed:
            self.frame(0, failed.kind, started, failed.body)
        except BaseException as error:  # noqa: BLE001  a test that raises has failed
            cause = error.__cause__
            kind, body = (
                (cause.kind, cause.body)
                if isinstance(cause, ProgramFailed)
                else (Kind.VALUE, describe(error))
            )
            self.frame(0, kind, started, body)
        else:
            self.frame(0, Kind.DONE, started, b"0")
        return 0

    def _execute(self, setup: str, test: str) -> None:
        namespace: dict[str, Any] = {"__name__": "test"}
        codes = [
            compile(source, name, "exec", dont_inherit=True)
            for source, name in ((setup, "setup"), (test, "test"))
        ]
        for name in (name for code in codes for name in _names(code)):
            if name not in vars(builtins) and name not in namespace:
                namespace[name] = (
                    sys.modules[name]
                    if name in _OFFERED and name in sys.modules
                    else self._proxy(name)
                )
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
            return self._value(self._answer(self._num_asked - 1))

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

    def _value(self, frame: Frame) -> Any:
        if frame.kind is Kind.VALUE:
            try:
                return unwrapped(values.decode(frame.body))
            except ValueError:
                raise ProgramFailed(Kind.ERROR, b'"the returned value is malformed"') from None
        if frame.kind is Kind.ERROR:
            _raise_like(frame)
        raise ProgramFailed(frame.kind, frame.body)


_OFFERED = frozenset(
    {
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
    }
)


def unwrapped(value: Any) -> Any:
    """Instances of subclasses of plain types as what they are underneath, all the way down; other
    foreign values stay.
    """
    kind = type(value)
    if kind is values.Foreign:
        return (
            unwrapped(value.value)
            if value.kind == "subclass"
            else values.Foreign(value.kind, value.type_name, unwrapped(value.value))
        )
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return kind(map(unwrapped, value))
    if kind is dict:
        return {unwrapped(key): unwrapped(item) for key, item in value.items()}
    return value


def _raise_like(frame: Frame) -> NoReturn:
    """Raise the builtin exception the program raised, if a test wants to catch it, else
    ProgramFailed.
    """
    text = values.decode(frame.body) if frame.body.startswith(b'"') else ""
    name, _, message = text.partition(": ")
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            error = kind(message)
        except TypeError:
            raise ProgramFailed(frame.kind, frame.body) from None
        error.__cause__ = ProgramFailed(frame.kind, frame.body)
        raise error
    raise ProgramFailed(frame.kind, frame.body)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _lines(descriptor: int, longest: int) -> Iterator[bytes]:
    """Lines from a pipe, without their ends; stops at the end of the pipe or at a line that is too
    long.
    """
    rest = b""
    while True:
        line, separator, after = rest.partition(b"\n")
        if separator:
            rest = after
            yield line
            continue
        if len(rest) > longest + 200:
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        rest += data
