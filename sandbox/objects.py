"""Objects of a program under test: the side of the program, which numbers them, and the side of the
tests, where an `Object` asks for everything that is done with it.

Invariants: no code of the program runs on the side of the tests; no operator shows the program a
value of a test, because the program could say that it is the right one: with a plain value it works
on a plain copy of the object, or does not exist.
"""

import builtins
import contextlib
import importlib
import inspect
import io
import operator
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from . import values
from .programs import Runner, described, load_program, open_streams
from .protocol import Kind

# The test is trusted: its own memory limit is lower.
_MAX_REQUEST_BYTES = 1 << 30
_FRAME_OVERHEAD_BYTES = 200
# Methods of plain types that get an expected value and answer whether it is right.
_PREDICATES = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint"})
RETURN = "return"
RAISE = "raise"
"""Operations that answer a call of a function of the test."""
PRINT = 0
READ_LINE = 1
"""Numbers of the first functions of the test: they write to its standard output, and read a line of
its standard input.
"""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **vars(builtins),
    **vars(operator),
    "call": lambda function, *args, **keywords: function(*args, **keywords),
    "next": lambda iterator: list(islice(iterator, 1)),
    "import": importlib.import_module,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
    "plain": values.plain_in,
}


class _Ended(BaseException):
    """The tests have ended."""


class Solver(Runner):
    """Loads the program, then answers each line of requests, its only file, with one frame.

    A request is (operation, arguments, keywords). A value that is not plain is answered as a
    number, by which later requests name it.
    """

    def run(self, code: str) -> None:
        """Answer until the test side closes its end of the requests."""
        self._is_loaded = False
        open_streams(_Stream(0, self._stream), _Stream(1, self._stream))
        self._stdout = sys.stdout
        # A program in the style of LeetCode expects the names of its environment.
        namespace = load_program(self, code, has_call_names="class Solution" in code)
        if namespace is None:
            return
        (requests,) = self._files
        self._lines = lines(requests, _MAX_REQUEST_BYTES)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        # Not in a copy, which would touch, and so copy, the page of each builtin.
        _OPERATIONS["global"] = partial(_global, namespace)
        # What it printed while it was loaded belongs to no test.
        self._stdout.flush()
        self._is_loaded = True
        with contextlib.suppress(_Ended):
            while True:
                self._answer(*self._next())

    def _next(self) -> Any:
        line = next(self._lines, None)
        if line is None:
            raise _Ended
        return values.decode(line, self._given)

    def _answer(self, operation: str, args: Any, keywords: Any) -> None:
        try:
            try:
                result = _OPERATIONS[operation](*args, **keywords)
            finally:
                self._stdout.flush()
            body = values.encode(result, self._numbered)
        except (MemoryError, SystemExit) as error:
            self.failure(0, error)
        except BaseException as error:  # noqa: BLE001  anything the program raises is its answer
            names = [kind.__name__ for kind in type(error).__mro__]
            self.frame(0, Kind.ERROR, values.encode([names, described(error)]))
        else:
            self.frame(0, Kind.VALUE, body)

    def _numbered(self, value: Any, depth: int) -> Any:
        """An object as [its number, its form]."""
        # A Counter, an OrderedDict and a defaultdict are as good as plain; numbers and text never
        # change.
        is_copied = type(value).__module__ == "collections"
        if is_copied or isinstance(value, int | float | str | bytes):
            return values.named(value, depth)
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        form: Any = "coroutine" if inspect.iscoroutine(value) else ""
        if isinstance(value, type) and issubclass(value, BaseException):
            form = [each.__name__ for each in value.__mro__]
        return {"o": [number, form]}

    def _given(self, tag: str, body: Any) -> Any:
        """What the test side means."""
        if tag == "u":
            return values.plain(tag, body)
        form, value = body
        match form:
            case "object":
                return self._objects[value]
            case "library":
                return operator.attrgetter(value[1])(importlib.import_module(value[0]))
            case "iterator":
                return iter(value)
        return self._callback(value)

    def _stream(self, number: int, argument: Any) -> Any:
        """Use a standard stream of the test. Nothing can be asked while the program loads."""
        return self._callback(number)(argument) if self._is_loaded else ""

    def _callback(self, number: int) -> Callable[..., Any]:
        """A function of the test, which is called there."""

        def call(*args: Any, **keywords: Any) -> Any:
            body = values.encode((number, args, keywords), self._numbered)
            self.frame(0, Kind.CALLBACK, body)
            while True:
                operation, given, more = self._next()
                if operation == RETURN:
                    return given[0]
                if operation == RAISE:
                    raise getattr(builtins, given[0], Exception)(given[1])
                self._answer(operation, given, more)

        return call


class _Stream(io.RawIOBase):
    """A standard stream of the program, which is the stream of the test: a test may replace its
    own. descriptor: as the interpreter has it; ask: calls a function of the test by its number.
    """

    def __init__(self, descriptor: int, ask: Callable[[int, Any], Any]) -> None:
        self._descriptor = descriptor
        self._ask = ask

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._descriptor == 0

    def writable(self) -> bool:
        return self._descriptor == 1

    def readinto(self, buffer: Any) -> int:
        # A character has at most four bytes.
        line: bytes = self._ask(READ_LINE, len(buffer) // 4).encode(errors="surrogateescape")
        buffer[: len(line)] = line
        return len(line)

    def write(self, data: Any) -> int:
        self._ask(PRINT, bytes(data).decode(errors="surrogateescape"))
        return len(data)


def _global(namespace: dict[str, Any], name: str) -> Any:
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined")
    return namespace[name]


class Object:
    """An object of the program, on the side of the tests. ask: (operation, arguments, keywords)."""

    __slots__ = ("__ask", "__number")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_Object__ask", ask)
        object.__setattr__(self, "_Object__number", number)

    def __getattr__(self, name: str) -> Any:
        # Libraries look for names with underscores to learn what an object can do.
        if name in _PREDICATES or (name.startswith("__") and name != "__name__"):
            raise AttributeError(f"an object of the program has no attribute {name!r} here")
        return self.__ask("getattr", self, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Object) and self.__ask("isinstance", value, self)

    def __next__(self) -> Any:
        for item in self.__ask("next", self):
            return item
        raise StopIteration


def _asked(name: str) -> Callable[..., Any]:
    return lambda self, *args, **keywords: self._Object__ask(name, self, *args, **keywords)


def _operator(name: str, turn: int) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if isinstance(other, Object):
            return self._Object__ask(name, self, other)
        for copy in self._Object__ask("plain", self):
            return getattr(operator, name)(*(copy, other)[::turn])
        return NotImplemented

    return operate


_ASKED = (
    "abs bool call delattr delitem float format getitem hash index int iter len neg pos repr round"
    " setattr setitem str"
)
_OPERATORS = "eq ne lt le gt ge add sub mul truediv floordiv mod pow and or xor"
for _name in _ASKED.split():
    setattr(Object, f"__{_name}__", _asked(_name))
for _name in _OPERATORS.split():
    setattr(Object, f"__{_name}__", _operator(f"__{_name}__", 1))
    setattr(Object, f"__r{_name}__", _operator(f"__{_name}__", -1))


def lines(descriptor: int, longest: int) -> Iterator[bytes]:
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
