"""Messages between a host and its cell over their socket pair: one spec and one reply per job.

Both ends are our own code. A spec carries descriptors: the payload (marshal: code and inputs, never
an expected output), the result file, then the standard input and output of each run. All are memory
files that the host creates, so no data needs pumping and a cell keeps nothing between jobs.
"""

from __future__ import annotations

import enum
import marshal
import struct
from typing import NamedTuple

NAMESPACES, LANDLOCK, NOTHING = 1, 2, 3
"""Levels of the jail, the strongest first."""
PAYLOAD, RESULT, FIRST_STREAM = 0, 1, 2
MAX_DESCRIPTORS = 200


class Mode(enum.IntEnum):
    """The work of the child.

    CALLS: run the code, then make the calls. STREAMS: run the code once per input. JUDGE: a test
    runs in one child and asks another child, which runs the code, for each call. COMPARE: compare
    one thing that a program emitted. CHECK: run a row's checker on the output of a program.
    """

    CALLS = 1
    STREAMS = 2
    JUDGE = 3
    COMPARE = 4
    CHECK = 5


class TestCode(NamedTuple):
    """A test as its child gets it.

    free: global names that setup and test use but do not bind, builtins excepted; tested: those of
    the function under test, which the program defines even if Python has a function of that name.
    """

    setup: str
    code: str
    free: list[str]
    tested: list[str]


class JobSpec(NamedTuple):
    """Mode and limits of one job.

    num_runs: calls or streams in the job; num_tests: tests that they belong to. Together they may
    use cpu_s of CPU time and sleep for sleep_s. A limit per run could not be enforced, because only
    the program could say when a run ends.
    """

    mode: int
    num_runs: int
    cpu_s: float
    sleep_s: float
    memory_bytes: int
    output_bytes: int
    num_tests: int = 1

    def pack(self) -> bytes:
        """As bytes."""
        return marshal.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> JobSpec:
        """From bytes."""
        return cls(*marshal.loads(data))


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
    fault: bytes = b""

    def pack(self) -> bytes:
        """As bytes."""
        return _REPLY.pack(*self[:5]) + self.fault

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """From bytes. Raises ValueError if they are too short for a reply."""
        if len(data) < _REPLY.size:
            raise ValueError(f"a reply has {_REPLY.size} bytes, not {len(data)}")
        ending, code, cpu_s, wall_s, peak_bytes = _REPLY.unpack_from(data)
        return cls(ending, code, cpu_s, wall_s, peak_bytes, data[_REPLY.size :])


_REPLY = struct.Struct("=iiddq")


class Hello(NamedTuple):
    """First message of a cell: the level that it reached, and the parts of the jail."""

    level: int
    landlock_abi: int
    has_seccomp: bool
    uid: int
    pid: int

    def pack(self) -> bytes:
        """As bytes."""
        return marshal.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """From bytes."""
        return cls(*marshal.loads(data))
