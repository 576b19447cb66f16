"""Children that decide about an output, mostly after its program has exited: by comparing a large
value, or by the checker of a row, as contests run checkers.

A checker is trusted as tests are, but its input is hostile; so it runs in a child like a program.
Forms: *kattis*, arguments input, answer, feedback directory, the output on standard input, exit
status 42 accepts; *testlib*, arguments input, output, answer, exit status 0 accepts; *printed*,
arguments input, answer, output, exit status 0 and the text `1` on standard output accept. A checker
that interacts has the same arguments; its standard streams are pipes to a program in another cell,
and what it writes to the file of the output is lost. Every other end rejects. A cell has no files
to give it: `open` knows the names of its arguments. Checkers in other languages are commands, which
get files (rewards/verifier/commands.py).
"""

import builtins
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .comparison import Printed, Returned, failure
from .programs import Runner, describe_text, described, exit_status, open_streams, run_main
from .protocol import CHECKER_ACCEPTS, Kind

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
