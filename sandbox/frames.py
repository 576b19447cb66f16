"""The lines `<run> <kind> <nanoseconds of CPU> <body>` of a result file.

Their reader trusts nothing: it is pure, never raises, and returns for any bytes a list of frames
and whether the rest was malformed.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

_MAX_NS = 1 << 50
_MAX_DIGITS = 16


class Kind(enum.Enum):
    """The meaning of a frame for its run. Only a judging child writes the last three."""

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


class Frame(NamedTuple):
    """run is -1 for loading the code; cpu_s and body are claims of the program."""

    run: int
    kind: Kind
    cpu_s: float
    body: bytes


class Frames(NamedTuple):
    """The frames up to the first malformed one, in order of runs -1, 0, 1, ..."""

    frames: list[Frame]
    is_malformed: bool


_KINDS = {kind.value: kind for kind in Kind}


def read_frames(data: bytes) -> Frames:
    """Frames in the bytes of a result file.

    A last line without its end is left out, because the child exited while writing it.
    """
    frames: list[Frame] = []
    for expected, line in enumerate(data.split(b"\n")[:-1], start=-1):
        frame = read_frame(line, expected)
        if frame is None:
            return Frames(frames, True)
        frames.append(frame)
    return Frames(frames, False)


def read_frame(line: bytes, expected: int) -> Frame | None:
    """The frame in a line if it is well formed and of the expected run, else None."""
    parts = line.split(b" ", 3)
    if len(parts) != 4:
        return None
    run, letter, nanoseconds, body = parts
    kind = _KINDS.get(letter)
    is_time = nanoseconds.isdigit() and len(nanoseconds) <= _MAX_DIGITS
    if kind is None or run != b"%d" % expected or not is_time:
        return None
    return Frame(expected, kind, min(int(nanoseconds), _MAX_NS) / 1e9, body)
