"""The work of a locked-down child: it runs a program on calls or on streams, or decides about an
output, and writes frames.

Nothing here is trusted once a program runs. Its child has no expected output, so it can change only
its own output.

An output is decided here if the value is large or if its row has a checker, mostly after its
program has exited. A checker is trusted as tests are, but its input is hostile. Forms, as contests
run checkers: *kattis*, arguments input, answer, feedback directory, the output on standard input,
exit status 42 accepts; *testlib*, arguments input, output, answer, exit status 0 accepts;
*printed*, arguments input, answer, output, exit status 0 and the text `1` on standard output
accept. A checker that interacts has the same arguments; its standard streams are pipes to a program
in another cell, and its writes to the file of the output are lost. Every other end rejects. A
cell has no files to give it: `open` knows the names of its arguments. Checkers in other languages
are commands, which get files (rewards/verifier/commands.py).
"""

import atexit
import builtins
import gc
import io
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from . import values
from .comparison import Printed, Returned, failure
from .preload import CALL_BUILTINS, CALL_NAMES
from .protocol import CHECKER_ACCEPTS, JobSpec, Kind

# A message goes into logs and samples.
_MESSAGE_CHARS = 300
_FRAME_OVERHEAD_BYTES = 100
_INPUT = "/input"
_OUTPUT = "/output"
_ANSWER = "/answer"
_FEEDBACK = "/feedback/"
_ARGUMENTS = {
    "kattis": (_INPUT, _ANSWER, _FEEDBACK),
    "testlib": (_INPUT, _OUTPUT, _ANSWER),
    "printed": (_INPUT, _ANSWER, _OUTPUT),
}
# More than the longest text that accepts.
_PRINTED_BYTES = 100
_MESSAGE = f"{_FEEDBACK}judgemessage.txt"


def described(error: BaseException) -> str:
    """An exception in words."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001  the program's own __str__ may raise anything
        return "an error that cannot be described"


def describe(error: BaseException) -> bytes:
    """An exception as a JSON string, cut to a readable length."""
    return describe_text(described(error))


def describe_text(text: str) -> bytes:
    """A message as a JSON string, cut to a readable length."""
    return json.dumps(text[:_MESSAGE_CHARS]).encode()


class Runner:
    """Writes frames.

    It keeps its own references, so that a program that patches a module by accident still gets its
    verdict. files: descriptors of its other files; kept: all that its process keeps.
    """

    def __init__(self, result: int, spec: JobSpec, files: Sequence[int]) -> None:
        self._result = result
        self._files = files
        self._limit = spec.output_bytes
        self.kept = [result, *files]
        self._write = os.write

    def frame(self, run: int, kind: Kind, body: bytes = b"0") -> None:
        """Write one line; a body over the limit becomes a TOO_LARGE frame."""
        # The kernel would cut the line in its middle, and a cut frame is malformed.
        if len(body) > self._limit - _FRAME_OVERHEAD_BYTES:
            kind = Kind.TOO_LARGE
            body = b"0"
        self._write(self._result, b"%d %s %s\n" % (run, kind.value, body))

    def compile(self, code: str) -> types.CodeType | None:
        """The program's code object; None after a COMPILE_ERROR frame."""
        try:
            # Editors of some systems start a file with a byte order mark.
            return compile(code.removeprefix("\ufeff"), "solution.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, OverflowError, MemoryError) as error:
            self.frame(-1, Kind.COMPILE_ERROR, describe(error))
        return None

    def failure(self, run: int, error: BaseException) -> None:
        """Write the frame for an exception that the program raised."""
        if isinstance(error, MemoryError):
            # What the failed run held may be in cycles; the next run needs the room.
            gc.collect()
            self.frame(run, Kind.MEMORY)
        elif isinstance(error, SystemExit):
            self.frame(run, Kind.EXIT, b"%d" % exit_status(error))
        else:
            self.frame(run, Kind.ERROR, describe(error))


def exit_status(error: BaseException | None) -> int:
    """The exit status that a process would have after this error."""
    code = error.code if isinstance(error, SystemExit) else error
    if code is None:
        return 0
    return code & 0xFF if type(code) is int else 1


def load_program(runner: Runner, code: str, *, has_call_names: bool) -> dict[str, Any] | None:
    """Run the program's body; return its namespace after a LOADED frame.

    Returns None after a frame with the reason why the program did not load.
    """
    compiled = runner.compile(code)
    if compiled is None:
        return None
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if has_call_names:
        module.__dict__["__builtins__"] = CALL_BUILTINS
        sys.modules["builtins"] = CALL_NAMES
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:  # noqa: BLE001  anything the program raises is its answer
        runner.failure(-1, error)
        return None
    runner.frame(-1, Kind.LOADED)
    return module.__dict__


class Calls(Runner):
    """Loads the code once, then makes every call."""

    def run(
        self, code: str, calls: list[tuple[str, list[Any]]], stop: bool, has_call_names: bool
    ) -> None:
        """Write one VALUE, ERROR, MEMORY, EXIT or TOO_LARGE frame per call, after LOADED.

        calls: name of a function, arguments; stop: leave the calls after the first that raises.
        """
        namespace = load_program(self, code, has_call_names=has_call_names)
        if namespace is None:
            return
        for run, (name, args) in enumerate(calls):
            try:
                body = values.encode(_function(namespace, name)(*args))
            except BaseException as error:  # noqa: BLE001  anything the program raises is its answer
                self.failure(run, error)
                if stop:
                    return
            else:
                self.frame(run, Kind.VALUE, body)


def _function(namespace: dict[str, Any], name: str) -> Any:
    """The function, or the method of a fresh `Solution()`."""
    if name in namespace:
        return namespace[name]
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


class Streams(Runner):
    """Runs the code once per pair of standard input and output, which are its files."""

    def run(self, code: str) -> None:
        """Write one DONE, ERROR, MEMORY or EXIT frame per run, after LOADED."""
        compiled = self.compile(code)
        if compiled is None:
            return
        self.frame(-1, Kind.LOADED)
        for run, pair in enumerate(zip(self._files[::2], self._files[1::2], strict=True)):
            for target, source in enumerate(pair):
                os.dup2(source, target)
                # A later run must not read the answer that this one printed.
                os.close(source)
            open_streams()
            # As in the runners of LiveCodeBench, APPS and their relatives.
            error = run_main(compiled, CALL_NAMES)
            if error is None:
                self.frame(run, Kind.DONE)
            else:
                self.failure(run, error)


def run_main(compiled: types.CodeType, names: types.ModuleType) -> BaseException | None:
    """Run the code as `__main__` to its end, threads, exit hooks and buffered output included.
    names: its builtins.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = sys.modules["builtins"] = names
    problem: BaseException | None = None
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:  # noqa: BLE001  anything the program raises is its answer
        problem = error
    try:
        # Output of threads and exit hooks belongs to the run: os._exit would lose it.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  exit hooks are the program's too
        problem = problem or error
    return problem


def open_streams(given: io.RawIOBase | None = None, printed: io.RawIOBase | None = None) -> None:
    """Open sys.stdin and sys.stdout, by default on descriptors 0 and 1. Standard error is
    discarded.
    """
    stdin = io.BufferedReader(given or io.FileIO(0, "r", closefd=False))
    stdout = io.BufferedWriter(printed or io.FileIO(1, "w", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(stdin, encoding="utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        stdout, encoding="utf-8", errors="surrogateescape", newline="\n"
    )
    # As Python sets them at its start; fast readers of contests look at them.
    sys.stdin.mode = "r"  # type: ignore[misc]
    sys.stdout.mode = "w"  # type: ignore[misc]
    sys.argv = ["solution.py"]


class Comparer(Runner):
    """Compares one thing. Result: LOADED, then PASSED or FAILED."""

    def run(self, relative_tolerance: float, fields: tuple[Any, ...]) -> None:
        """Compare. fields: of a Returned, or of a Printed, which has fewer."""
        self.frame(-1, Kind.LOADED)
        emitted = Returned if len(fields) == len(Returned._fields) else Printed
        reason = failure(emitted(*fields), relative_tolerance)
        self.frame(0, Kind.FAILED if reason else Kind.PASSED, describe_text(reason))


class Checker(Runner):
    """Runs a checker. Result: LOADED, then PASSED or FAILED.

    Its files: standard input and output, then input and answer of the test.
    """

    def run(self, code: str, form: str, interacts: bool) -> None:
        """Check the output on standard input, or the program that writes it there."""
        compiled = self.compile(code)
        if compiled is None:
            return
        self.frame(-1, Kind.LOADED)
        stdin, stdout, given, answer = self._files
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        readable = {_INPUT: given, _ANSWER: answer}
        if not interacts:
            readable[_OUTPUT] = stdin
        open_streams()
        sys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")
        sys.stderr = io.StringIO()
        sys.argv = ["checker", *_ARGUMENTS[form]]
        message = _Message()
        builtins.open = io.open = _opener(readable, message)
        # A checker that leaves this way has decided, too.
        os._exit = _leave
        problem = run_main(compiled, builtins)
        status = exit_status(problem)
        has_said = form != "printed" or os.pread(stdout, _PRINTED_BYTES, 0).strip() == b"1"
        is_right = status == CHECKER_ACCEPTS[form] and has_said
        said = message.getvalue().strip() or sys.stderr.getvalue().strip()
        reason = f": {described(problem)}" if problem else ""
        said = said or f"the checker exited with status {status}{reason}"
        self.frame(0, Kind.PASSED if is_right else Kind.FAILED, describe_text(said))


class _Message(io.StringIO):
    """A text in memory that outlives its end."""

    def close(self) -> None:
        """Keep the text."""


def _opener(readable: Mapping[str, int], message: _Message) -> Callable[..., Any]:
    """`open` of a checker, which opens its files by name. Feedback other than the message is
    lost.
    """
    open_file = io.open

    def open_by_name(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        name = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        is_binary = "b" in mode
        if name in readable:
            os.lseek(readable[name], 0, os.SEEK_SET)
            return open_file(os.dup(readable[name]), mode, errors=None if is_binary else "replace")
        if not name.startswith((_FEEDBACK, _OUTPUT)):
            return open_file(file, mode, *args, **keywords)
        if is_binary:
            return io.BytesIO()
        return message if name == _MESSAGE else io.StringIO()

    return open_by_name


def _leave(status: int) -> NoReturn:
    raise SystemExit(status)
