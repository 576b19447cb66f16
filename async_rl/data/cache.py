"""The directory of cached models and data, and the lock under which they are made.

Invariant: a lock ends with its owner, so a killed process does not block others.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_root(cache_dir: str | None) -> Path:
    """The directory that cache_dir names."""
    return (
        Path(cache_dir).expanduser().absolute()
        if cache_dir
        else Path.home() / ".cache" / "async_rl"
    )


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`; on_wait is called once if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
