"""Assert tests: the tests of a row run in one child, the program in another, and only plain values
and numbers of objects pass between them (`objects.py`).

In the code of a test a name is the test's own, of its imports or of the interpreter; only
`solution.NAME`, and a free name that nothing else defines, is asked of the program. Both children
are locked down like any child; the program's has neither the code of the tests nor the result file.
Invariants: every answer of the program is treated as hostile; a passed test has asked the program;
a program that could not answer fails the test even if the test catches the exception; after the
first answer no outcome is the fault of the test, because the program may have chosen it
(docs/decisions/one_rule_for_names.md).
"""

import ast
import builtins
import contextlib
import importlib
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, MappingView, Sequence
from typing import Any, NoReturn

from . import cases, values
from .objects import RAISE, RETURN, Object, lines
from .programs import Runner, describe, describe_text
from .protocol import Frame, JobSpec, Kind, read_frame

_ANSWERS = frozenset({Kind.VALUE, Kind.ERROR, Kind.EXIT, Kind.MEMORY, Kind.TOO_LARGE})
# Exceptions of the program that fail the test. A test raises an AssertionError itself; a
# NameError means that the program has no such function; StopIteration and its async form would
# end a loop of the test early, and `all(map(...))` would hold.
_FATAL = frozenset({"AssertionError", "StopIteration", "StopAsyncIteration"})

# They become an iterator on the other side.
_LISTED: Any = Iterator | MappingView


class ProgramFailed(BaseException):
    """The test cannot continue. Not an Exception: a test's `except Exception` must not catch it."""


class _Raised(Exception):
    """Marks an exception as the program's."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


class _Names(dict[str, Any]):
    """The builtins of a test; a name that they do not have is asked of the program by `find`."""

    find: Callable[[str], Any]

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        return self.find(name)


NAMES = _Names()
"""Filled in the zygote, once preload.py has completed the builtins: a copy in each child would
touch, and so copy, the page of each builtin.
"""


class Tests(Runner):
    """Runs tests one after the other.

    Result: LOADED, then PASSED, FAILED or BROKEN_TEST, or the frame of the solver's own failure,
    for each.
    """

    def __init__(self, result: int, spec: JobSpec, files: Sequence[int]) -> None:
        super().__init__(result, spec, files)
        self._requests, answers = files
        self._answers = lines(answers, spec.output_bytes)
        # Threads of a test ask one after the other.
        self._turn = threading.RLock()
        self._num_asked = self._num_answers = 0
        self._settled: tuple[Kind, bytes] | None = None
        self._objects: dict[int, Any] = {}
        self._errors: dict[str, type[Exception]] = {}
        # At PRINT and READ_LINE, for the program's standard streams.
        self._callbacks: list[Callable[..., Any]] = [
            lambda text: sys.stdout.write(text),
            lambda size: sys.stdin.readline(size),
        ]

    def run(
        self, setup: str, tests: Sequence[tuple[str, str, list[str], bool]], stop: bool
    ) -> None:
        """Write the verdict of each test, up to one that the solver does not survive.

        tests: (statements that setup and test may leave out, code, names that the program defines
        although Python or the setup has them, whether pytest runs it). stop: leave the tests after
        the first that fails. A program that does not load has its own frame for run -1 instead.
        """
        loaded = self._read(-1)
        # A solver may not decide: it could write PASSED, or a broken test that never counts.
        if loaded.kind not in (Kind.LOADED, Kind.COMPILE_ERROR, *(_ANSWERS - {Kind.VALUE})):
            loaded = loaded._replace(kind=Kind.ERROR, body=b'"its answer is malformed"')
        self.frame(-1, loaded.kind, loaded.body)
        if loaded.kind is not Kind.LOADED:
            return
        for run, test in enumerate(tests):
            self._num_asked = self._num_answers = 0
            kind, body = self._ruling(setup, *test)
            self.frame(run, kind, body)
            if self._settled is not None or (stop and kind is not Kind.PASSED):
                break

    def _ruling(self, setup: str, *test: Any) -> tuple[Kind, bytes]:
        problem: BaseException | None = None
        try:
            self._execute(setup, *test)
        except BaseException as error:  # noqa: BLE001  a test that raises has failed
            # Some tests end in sys.exit(0).
            problem = None if isinstance(error, SystemExit) and not error.code else error
        # First: the test may have caught the exception and continued.
        if self._settled is not None:
            return self._settled
        if problem is not None and isinstance(problem.__cause__, _Raised):
            return Kind.ERROR, problem.__cause__.body
        if problem is not None:
            return (Kind.FAILED if self._num_answers else Kind.BROKEN_TEST), describe(problem)
        if self._num_asked:
            return Kind.PASSED, b"0"
        return Kind.BROKEN_TEST, b'"the test ended without a call of the program"'

    def _execute(
        self, setup: str, imports: str, code: str, names: list[str], needs_pytest: bool
    ) -> None:
        NAMES.find = self._global
        module = types.ModuleType("test")
        module.__dict__["__builtins__"] = NAMES
        sources = {"imports": imports, "setup": setup, "test": code}
        compiled = [
            compile(source, name, "exec", dont_inherit=True) for name, source in sources.items()
        ]
        # For `from solution import f`, which tests of some data sets have.
        solution = types.ModuleType("solution")
        solution.__dict__.update(__getattr__=self._attribute, __all__=[])
        sys.modules["solution"] = solution
        if "import" in code:
            # Before the program has a part in it: a row with an import that fails is broken.
            tree = ast.parse(code)
            kinds = ast.Import | ast.ImportFrom
            tree.body = [each for each in tree.body if isinstance(each, kinds)]
            exec(compile(tree, "imports", "exec", dont_inherit=True), {})
        for part in compiled[:-1]:
            exec(part, module.__dict__)
        module.__dict__.update({name: self._global(name) for name in names})
        if "unittest" in code:
            # It would run the tests of __main__ and leave; they are run below.
            importlib.import_module("unittest").main = lambda *_, **__: None  # type: ignore[attr-defined]
        cases.share_patches(code, self._ask)
        exec(compiled[-1], module.__dict__)
        run = cases.run_by_pytest if needs_pytest else cases.run
        run(module)

    def _attribute(self, name: str) -> Any:
        # The import system looks for such names in a module.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._global(name)

    def _global(self, name: str) -> Any:
        found = self._ask("global", name)
        # An object means that the program has the name; it has not computed anything yet.
        self._num_answers -= isinstance(found, Object)
        return found

    def _ask(self, operation: str, *args: Any, **keywords: Any) -> Any:
        with self._turn:
            self._send(operation, args, keywords)
            frame = self._read(0)
            self._num_asked += 1
            self._num_answers += 1
            while frame.kind is Kind.CALLBACK:
                self._call(*self._decoded(frame))
                frame = self._read(0)
            return self._value(frame)

    def _send(self, operation: str, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        request = values.encode((operation, args, keywords), self._passed)
        try:
            os.write(self._requests, request + b"\n")
        except OSError:
            self._settle(b'"the program ended the process"')

    def _passed(self, value: Any, depth: int) -> Any:
        """A value of the test that is not plain, for the program."""
        if isinstance(value, Object):
            return {"o": ["object", object.__getattribute__(value, "_Object__number")]}
        if callable(value):
            name = (str(getattr(value, "__module__", "")), getattr(value, "__qualname__", ""))
            if name[0] in sys.stdlib_module_names:
                with contextlib.suppress(AttributeError):
                    if operator.attrgetter(name[1])(sys.modules[name[0]]) is value:
                        return {"o": ["library", [*name]]}
            self._callbacks.append(value)
            return {"o": ["callback", len(self._callbacks) - 1]}
        # After functions: a mock is both.
        if isinstance(value, _LISTED):
            return {"o": ["iterator", values.tagged([*value], depth, self._passed)]}
        tagged = values.named(value, depth)
        if "o" in tagged:
            kind = Kind.ERROR if self._num_answers else Kind.BROKEN_TEST
            self._settle(b'"a value of the test cannot be passed to another process"', kind)
        return tagged

    def _call(self, number: int, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Call a function of the test for the program."""
        try:
            result = RETURN, [self._callbacks[number](*args, **keywords)]
        except AssertionError as error:
            self._settle(describe(error), Kind.FAILED)
        except Exception as error:  # noqa: BLE001  the program may catch it
            result = RAISE, [type(error).__name__, str(error)]
        self._send(*result, {})

    def _settle(self, body: bytes, kind: Kind = Kind.ERROR) -> NoReturn:
        """Fix the result, whatever the test does with the exception."""
        self._settled = self._settled or (kind, body)
        raise ProgramFailed

    def _read(self, run: int) -> Frame:
        line = next(self._answers, None)
        frame = read_frame(line, run) if line is not None else None
        if frame is None:
            reason = b'"the program ended the process, or its answer was malformed"'
            if run < 0:
                return Frame(run, Kind.ERROR, reason)
            self._settle(reason)
        return frame

    def _value(self, frame: Frame) -> Any:
        if frame.kind not in _ANSWERS:
            self._settle(b'"the program sent a frame that is not an answer"')
        if frame.kind not in (Kind.VALUE, Kind.ERROR):
            self._settle(frame.body, frame.kind)
        value = self._decoded(frame)
        if frame.kind is Kind.VALUE:
            return value
        try:
            names, text = value
            kind = self._exception(names)
            body = describe_text(text)
            # Not a subclass of NameError: a variable without a value is an error like any other.
            is_fatal = not _FATAL.isdisjoint(names) or names[0] == "NameError"
        except (LookupError, TypeError, ValueError):
            self._settle(b'"the exception is malformed"')
        if is_fatal:
            self._settle(body)
        message = text.partition(": ")[2]
        try:
            error = kind(message)
        except TypeError:
            # Some exceptions take more arguments, such as UnicodeDecodeError.
            error = Exception(message)
        raise error from _Raised(body)

    def _exception(self, names: list[Any]) -> type[Exception]:
        """The exception class with these names of itself and its bases, the same each time: for
        `except` and `raises` of a test.
        """
        found = Exception
        for name in reversed(names):
            known = self._errors.get(name) or vars(builtins).get(name)
            if known is None:
                known = self._errors[name] = type(str(name), (found,), {})
            if isinstance(known, type) and issubclass(known, Exception):
                found = known
        return found

    def _decoded(self, frame: Frame) -> Any:
        try:
            return values.decode(frame.body, self._object)
        except ValueError:
            self._settle(b'"the returned value is malformed"')
        except MemoryError:
            self._settle(b"0", Kind.MEMORY)

    def _object(self, tag: str, body: Any) -> Any:
        if tag == "u" or type(body) is str:
            return values.plain(tag, body)
        number, form = body
        if type(number) is not int:
            raise ValueError("an object has a number")
        if type(form) is list:
            return self._exception(form)
        # The same object each time, so that `is` works.
        found = self._objects.setdefault(number, Object(self._ask, number))
        return self._awaited(found) if form == "coroutine" else found

    async def _awaited(self, found: Object) -> Any:
        return self._ask("await", found)
