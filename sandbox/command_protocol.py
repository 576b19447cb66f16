"""Messages between a host and a command cell: one spec with descriptors, and one reply, per
command.

The descriptors are memory files that the host creates: standard input, standard output, the text
of standard error, the product, then the executable if the spec has no path of one, then the
contents of `files`.
"""

from __future__ import annotations

import enum
import marshal
from typing import NamedTuple

STDIN, STDOUT, STDERR, PRODUCT, FIRST_FILE = 0, 1, 2, 3, 4
STDERR_BYTES = 8192
"""Bytes of standard error that are kept of its beginning, and of its end."""
MAX_SPEC_BYTES = 1 << 16


class Profile(enum.IntEnum):
    """The system calls of a command.

    PROGRAM: one process with threads, started by one execve, which nothing can follow. TOOLS: may
    start other programs among `executable`; for compilers and shells.
    """

    PROGRAM = 1
    TOOLS = 2


class CommandSpec(NamedTuple):
    """One command and its limits.

    executable: path, or "" for the descriptor after the product. files: names that the contents of
    the other descriptors get in the working directory. product: name of a file of the working
    directory to return; a name that ends with "/" returns the files below that directory as an
    uncompressed zip. readable, runnable: paths below which files can be read, and executed.
    cpu_s: of all processes together; memory_bytes: resident, of all processes together;
    address_space_bytes, data_bytes: of each process, 0 for no limit; file_bytes: of each written
    file; scratch_bytes: of all files in the working directory.
    """

    profile: int
    executable: str
    arguments: list[str]
    environment: dict[str, str]
    files: list[str]
    product: str
    readable: list[str]
    runnable: list[str]
    cpu_s: float
    sleep_s: float
    memory_bytes: int
    address_space_bytes: int
    data_bytes: int
    file_bytes: int
    scratch_bytes: int
    max_tasks: int

    def pack(self) -> bytes:
        """As bytes. Raises ValueError if they are too many for one message."""
        data = marshal.dumps((int(self.profile), *self[1:]))
        if len(data) > MAX_SPEC_BYTES:
            raise ValueError(f"the command has {len(data)} bytes, more than {MAX_SPEC_BYTES}")
        return data

    @classmethod
    def unpack(cls, data: bytes) -> CommandSpec:
        """From bytes."""
        return cls(*marshal.loads(data))
