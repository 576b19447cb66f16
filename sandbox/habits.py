"""Replacements for calls that contest programs make and that a jail refuses.

Installed once in the zygote, for convenience only: they protect nothing, because a program can undo
them. The limits hold whatever `setrlimit` answers.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import threading
from typing import Any

_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_LARGEST_STACK_BYTES = 64 << 20
"""Programs ask for up to 512 MB for deep recursion. Address space is limited, and Python 3.11 needs
no stack for a call of a Python function.
"""


def open_named(name: str, mode: str) -> Any:
    """The file of that name, None if it is one of the file system's. A checker's child replaces
    this function.
    """
    return None


def install() -> None:
    """Replace the functions."""
    open_file, set_stack_size = io.open, threading.stack_size

    def open_stream(file: Any, *args: Any, **keywords: Any) -> Any:
        """`open`, which knows the standard streams by their names: a cell has no /proc."""
        if isinstance(file, str | os.PathLike):
            mode = args[0] if args else keywords.get("mode", "r")
            named = open_named(os.fspath(file), mode)
            if named is not None:
                return named
        if type(file) is str and file in _STREAMS:
            file = os.dup(_STREAMS[file])
        return open_file(file, *args, **keywords)

    def stack_size(size: int = 0) -> int:
        """`threading.stack_size` with a largest size."""
        return set_stack_size(min(size, _LARGEST_STACK_BYTES))

    def set_limit(resource_kind: int, limits: tuple[int, int]) -> None:
        """`resource.setrlimit` without an effect: a program may not change its limits."""

    builtins.open = io.open = open_stream
    threading.stack_size = stack_size
    resource.setrlimit = set_limit
