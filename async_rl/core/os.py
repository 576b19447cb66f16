"""Requests to the Linux kernel that the standard library does not offer, and files that are either
old or new.

The jail in sandbox/ has its own calls, because it imports nothing of the project.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

RESTART_CODE = os.EX_TEMPFAIL
"""Exit code of a process that requests a restart (RestartNeeded)."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ANY_PARENT = 0


def die_with_parent(parent_pid: int = _ANY_PARENT) -> None:
    """Let the kernel kill this process when the thread that started it exits.

    parent_pid: the process that should be the parent. If that process has exited already, this
    process exits immediately; the kernel sends no signal for an end before the call. Raises OSError
    if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # prctl reads five arguments; the unused ones must be 0.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid != _ANY_PARENT and os.getppid() != parent_pid:
        os._exit(1)


def leave(code: int) -> NoReturn:
    """End this process without destructors, exit hooks and a wait for its threads.

    Every process that has joined a process group, or that has an engine, ends here: threads of gloo
    that still release the memory of their last work abort a process that ends in the usual way, and
    the threads and exit hooks of engines can hang for minutes.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Let only the owner read what this process, and a child that it starts here, writes."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, and a process that is killed here, sees all of it or the one
    before.
    """
    # rename is atomic within a directory.
    _partial(path, data).replace(path)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by one that only its owner can read, from the first byte on."""
    # A new file: an existing one may be readable by others, and a link may lead elsewhere.
    with owner_only():
        replace_file(path, data)


def replace_synced(path: Path, data: bytes) -> None:
    """As replace_file, and return once the file is on the disk: a power loss leaves it whole."""
    partial = _partial(path, data)
    # Before the rename: the name could reach the disk before the content.
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def _partial(path: Path, data: bytes) -> Path:
    # In the same directory, since a file cannot be renamed from one file system to another.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    return partial


def sync_tree(directory: Path) -> None:
    """Return once everything in the directory, and its names, are on the disk."""
    # The directory itself last, so that its names reach the disk after the files.
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Return once this file, or the names in this directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
