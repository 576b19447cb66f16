"""A directory for what was sent to a node along with one process: only its owner can read it, and
it goes when whoever made it ends.

Invariants
- Its maker holds a lock on it.  A shell that is nobody's child removes it once the maker has ended,
  however that came.
- What is left of a node that went down is removed by the next who makes a directory there: nobody
  holds its lock.
Used by the actors of ray_launcher.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "async_rl-"
_LOCK = ".held"
_REMOVE = 'exec 3<&0; (read -r _ <&3; rm -rf -- "$0"; sleep 1; rm -rf -- "$0") &'
"""Standard input ends with the maker; the second time is for what its dying child wrote meanwhile.
"""


class NodeDirectory:
    """One directory below the node's temporary one; `path` is where. Made and filled by one
    process, which calls `remove` if it can.
    """

    def __init__(self, label: str) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{label}-"))
        unheld = self.path / f"{_LOCK}.new"
        self._held = unheld.open("wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        unheld.rename(self.path / _LOCK)  # nobody sees it without its lock
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._remover.wait()  # what remains runs on by itself

    def write(self, name: str, data: bytes) -> None:
        """A file in it."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(data)

    def remove(self) -> None:
        """At once, instead of when the process ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()
        if self._remover.stdin is not None:
            self._remover.stdin.close()


def sweep(parent: Path) -> None:
    """Removes the directories in `parent` that are ours and that nobody holds any more."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
