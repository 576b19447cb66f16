"""What a host and its cell say to each other over their socket pair: one request and one reply per
job, both sides ours.

A request carries descriptors: the payload (marshal: code and inputs, never an expected output), the
result file, then the standard input and output of each run.  All are memory files the host made, so
nothing needs pumping and a cell holds no data between jobs.
"""

from __future__ import annotations

import enum
import marshal
import struct
from typing import NamedTuple

PAYLOAD, RESULT, FIRST_STREAM = 0, 1, 2
MAX_DESCRIPTORS = 200


class Mode(enum.IntEnum):
    """What the child does. CALLS: run the code, then make the calls. STREAMS: run the code once per
    input. JUDGE: a test runs in one child and asks another, which runs the code, for each call.
    """

    CALLS = 1
    STREAMS = 2
    JUDGE = 3


class Request(NamedTuple):
    """Limits of one job. num_runs: calls or streams in it; each may use cpu_s of CPU time and sleep
    for sleep_s.
    """

    mode: int
    num_runs: int
    cpu_s: float
    sleep_s: float
    memory_bytes: int
    output_bytes: int

    def pack(self) -> bytes:
        """As bytes."""
        return marshal.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """From bytes."""
        return cls(*marshal.loads(data))


class Ending(enum.IntEnum):
    """How the child ended. FAULT: it could not be locked down, so it never ran the program."""

    EXITED = 1
    SIGNALED = 2
    CPU = 3
    WALL = 4
    CANCELLED = 5
    FAULT = 6


class Reply(NamedTuple):
    """What the zygote saw of the child. code: exit status or signal; peak_bytes: largest resident
    size.

    fault: why the child could not be locked down.
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
        """From bytes. Raises ValueError if they are no reply."""
        if len(data) < _REPLY.size:
            raise ValueError(f"a reply has {_REPLY.size} bytes, not {len(data)}")
        ending, code, cpu_s, wall_s, peak_bytes = _REPLY.unpack_from(data)
        return cls(ending, code, cpu_s, wall_s, peak_bytes, data[_REPLY.size :])


_REPLY = struct.Struct("=iiddq")


class Hello(NamedTuple):
    """First message of a cell: the level it reached, and its parts."""

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
