"""Messages between a host and its cell: one spec with descriptors, and one reply, per job; and the
frames that a child writes to its result file.

The host and the cell both run our code. The descriptors are memory files that the host creates, so
no data needs pumping and a cell keeps nothing between jobs. A program: the payload (marshal: code
and inputs, never an expected output), the result file, then standard input and output of each run.
A command: standard input, standard output, the text of standard error, the product, the executable
if the spec has no path, then the contents of `files`.

A result file has lines `<run> <kind> <body>`. Whoever reads them trusts
nothing: reading is pure, never raises, and returns for any bytes a list of frames and whether the
rest was malformed.

Two cells may run a pair: a program and the checker that answers it. Their standard streams are
pipes, and `peer` of each spec is the host's number of the zygote of the other.
"""

import enum
import re
from typing import NamedTuple

NAMESPACES = 1
LANDLOCK = 2
NOTHING = 3
"""Levels of the jail, the strongest first."""
JOBS = "jobs"
COMMANDS = "commands"
"""Kinds of cells: Python programs, and programs of other languages."""
NOTHING_LEFT = b"[]"
"""The answer of a cell to a cancellation."""
CELL_UID = 61_184
"""Host uid and gid of a cell whose server is root: the first of systemd's range for services
without a fixed user.
"""
RESULT = 1
FIRST_STREAM = 2
STDIN = 0
STDOUT = 1
STDERR = 2
PRODUCT = 3
FIRST_FILE = 4
# The kernel passes at most 253 in one message.
MAX_DESCRIPTORS = 200
STDERR_BYTES = 1 << 14
"""Bytes kept from the start of standard error."""
MAX_SPEC_BYTES = 1 << 16
SLEEP_S = 1.0
"""A job may sleep for its CPU time and this much longer."""


class Mode(enum.IntEnum):
    """The work of the child.

    CALLS: run the code, then make the calls. STREAMS: run the code once per input. JUDGE: tests
    run in one child and ask another child, which runs the code. COMPARE: compare
    one thing that a program emitted. CHECK: run a row's checker on the output of a program.
    """

    CALLS = 1
    STREAMS = 2
    JUDGE = 3
    COMPARE = 4
    CHECK = 5


class JobSpec(NamedTuple):
    """Mode and limits of one job.

    num_runs: calls or streams in the job; num_tests: tests that they belong to. All runs together
    may use cpu_s of CPU time and sleep for SLEEP_S longer. A limit per run could not be enforced,
    because only the program could report when a run finishes.
    """

    mode: int
    num_runs: int
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    num_tests: int = 1
    peer: int = 0


class Profile(enum.IntEnum):
    """The system calls of a command.

    PROGRAM: one process with threads, started by one execve, which nothing can follow. TOOLS: may
    start other programs among `executable`; for compilers and shells.
    """

    PROGRAM = 1
    TOOLS = 2


class CommandSpec(NamedTuple):
    """One command and its limits.

    executable: path, or "" for the descriptor after the product. environment: NAME=value. files:
    names that the contents of the other descriptors get in the working directory. product: name of
    a file of the working directory to return. readable, runnable: paths below which files can be
    read, and executed. cpu_s, memory_bytes: of all processes together, memory resident;
    process_limits: arguments of setrlimit for each process; file_bytes: of each written file;
    scratch_bytes: of all files in the working directory.
    """

    profile: int
    executable: str
    arguments: list[str]
    environment: list[str]
    files: list[str]
    product: str
    readable: list[str]
    runnable: list[str]
    cpu_s: float
    memory_bytes: int
    process_limits: list[tuple[int, int]]
    file_bytes: int
    scratch_bytes: int
    peer: int = 0


class Ending(enum.IntEnum):
    """The end of the child. FAULT: it could not be locked down, so it never ran the program."""

    EXITED = 1
    SIGNALED = 2
    CPU = 3
    WALL = 4
    CANCELLED = 5
    FAULT = 6


class Reply(NamedTuple):
    """The zygote's observation of the child.

    code: exit status or signal; peak_bytes: largest resident size; fault: why the child could not
    be locked down.
    """

    ending: int
    code: int
    cpu_s: float
    wall_s: float
    peak_bytes: int
    fault: str = ""


class Kind(enum.Enum):
    """The meaning of a frame for its run.

    Only a judging child writes PASSED, FAILED and BROKEN_TEST, and it reads CALLBACK.
    """

    LOADED = b"l"
    VALUE = b"v"
    DONE = b"d"
    ERROR = b"e"
    EXIT = b"x"
    MEMORY = b"m"
    TOO_LARGE = b"o"
    COMPILE_ERROR = b"c"
    PASSED = b"p"
    FAILED = b"w"
    BROKEN_TEST = b"t"
    CALLBACK = b"k"


CHECKER_ACCEPTS = {"kattis": 42, "testlib": 0, "printed": 0}
"""The form of a checker -> the exit status that accepts an output; every other end rejects it,
because an output on which a checker fails must not choose to be left unjudged.
"""


class Frame(NamedTuple):
    """run is -1 for loading the code; body is a claim of the program."""

    run: int
    kind: Kind
    body: bytes


class Frames(NamedTuple):
    """The frames up to the first malformed one, in order of runs -1, 0, 1, ..."""

    frames: list[Frame]
    is_malformed: bool


_FRAME = re.compile(rb"(-?[0-9]+) ([%s]) (.*)" % b"".join(kind.value for kind in Kind), re.DOTALL)


def read_frames(data: bytes, num_runs: int) -> Frames:
    """Frames in the bytes of a result file, of loading and of the runs.

    A last line without its end is left out, because the child exited while writing it.
    """
    frames: list[Frame] = []
    # Each run must have its frame in order, so no frame can stand for another run.
    for expected, line in enumerate(data.split(b"\n", num_runs + 1)[:-1], start=-1):
        frame = read_frame(line, expected)
        if frame is None:
            return Frames(frames, True)
        frames.append(frame)
    return Frames(frames, False)


def read_frame(line: bytes, expected: int) -> Frame | None:
    """The frame in a line if it is well formed and of the expected run, else None."""
    match = _FRAME.fullmatch(line)
    if match is None or match[1] != b"%d" % expected:
        return None
    return Frame(expected, Kind(match[2]), match[3])
