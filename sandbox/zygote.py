"""The process of a cell: enters the requested level of the jail, then runs one job at a time.

Takes a spec with descriptors from the host, starts the children of the job, and sends a reply that
reports how they exited. It never reads code or data. It exits when the host's end of the socket
closes, and with its parent in any case.
"""

import _socket  # socket itself would add a third of a megabyte of enumerations to each fork
import gc
import json
import os
from collections.abc import Callable, Mapping

from . import linux, namespaces, watch
from .protocol import (
    COMMANDS,
    MAX_DESCRIPTORS,
    MAX_SPEC_BYTES,
    NAMESPACES,
    NOTHING_LEFT,
    Reply,
)


def main(
    kind: str,
    level: int,
    host: int,
    descriptor: int,
    packages: Mapping[str, str],
    readable: list[str],
) -> None:
    """Enter the requested level, then serve.

    host: process id of the host; descriptor: of the socket to it; packages: name -> directory;
    readable: paths.
    """
    # Runs write for their owner only, but the root of a cell is made by root and read by CELL_UID.
    os.umask(0o022)
    # Everything is imported now: our own files cannot be read inside the namespaces.
    if kind == COMMANDS:
        from .commands import Commands
    else:
        from . import preload
        from .jobs import Jobs

        preload.load(packages)
    proc = watch.open_proc()  # before the namespaces hide it
    if level == NAMESPACES:
        namespaces.become_first_process(readable, host, descriptor)
        namespaces.renew_scratch()
    else:
        linux.die_with(host)
        os.chdir("/")
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    works: Commands | Jobs = Commands(proc) if kind == COMMANDS else Jobs(level, readable, proc)
    _serve(_socket.socket(fileno=descriptor), works.run, watch.number_of_self(proc))


def _serve(
    host: _socket.socket, run: Callable[[bytes, list[int], int], Reply], number: int
) -> None:
    """run: runs one job to its end, given its spec, its descriptors and the host's descriptor, on
    which the host cancels it by sending; number: of this process.
    """
    with open("/dev/null", "wb") as nothing:
        # Standard error was for the reason of a failed start; programs must not fill it.
        os.dup2(nothing.fileno(), 2)
    # Children share the zygote's pages. A collection would write to all of them in every child.
    gc.collect()
    gc.freeze()
    # Ready: a cell that has not reached its level exits.
    host.send(b"[%d]" % number)
    space = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
    while True:
        spec, ancillary, _flags, _address = host.recvmsg(MAX_SPEC_BYTES, space)
        # The host has closed its end.
        if not spec:
            os._exit(0)
        # A cancellation, after the reply of its job if it came in time.
        if not ancillary:
            host.send(NOTHING_LEFT)
            continue
        descriptors = memoryview(ancillary[0][2]).cast("i").tolist()
        host.send(json.dumps(run(spec, descriptors, host.fileno())).encode())
