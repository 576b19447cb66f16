"""The directory of cached models and data, and the lock under which they are made.

Invariant: a lock is released with its owner, so a killed process does not block others.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_SCRATCH_SUFFIX = ".build"
_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Return the user's cache directory: $XDG_CACHE_HOME/async_rl, or ~/.cache/async_rl."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard of the variable (freedesktop.org) says that a relative path is ignored.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "async_rl"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return a file or directory of the cache; `build` makes it if it does not exist.

    It is made in the same directory and renamed, so no process ever sees a part of it.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{target.name}.lock")
    with lock.open("w") as file:
        try:
            # flock, because the kernel releases it when the process exits, however it exits.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that makes %s (lock %s)", target, lock)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have built it while this one waited.
        if not target.exists():
            # With the lock, these can only be the rest of a killed build.
            for leftover in target.parent.glob(f"{target.name}.*{_SCRATCH_SUFFIX}"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(
                prefix=f"{target.name}.", suffix=_SCRATCH_SUFFIX, dir=target.parent
            ) as scratch:
                built = Path(scratch) / "built"
                build(built)
                built.rename(target)
    return target
