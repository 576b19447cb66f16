"""A directory for the files that were sent to a node with one process.

Invariants
- Only its owner can read it, and it is removed when its maker exits.
- The maker keeps a lock on it. A detached shell removes the directory once the maker has exited, by
  any signal.
- After a crash of the node, the next maker removes the directories without a locked file.
"""

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
"""Standard input is closed when the maker exits. The second removal deletes what its dying child
wrote.
"""


class NodeDirectory:
    """A directory at `path` below the node's temporary one, made and filled by one process."""

    def __init__(self, label: str) -> None:
        # Only this removes the directories of makers whose node crashed.
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{label}-"))
        # Locked under another name first: `sweep` of another process never sees it unlocked.
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = unlocked.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._remover.wait()  # its background part keeps running

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only the owner can read."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Before the content: keys must never be readable by others, not even for a moment.
        path.touch(mode=0o600)
        path.write_bytes(data)

    def remove(self) -> None:
        """Remove the directory now instead of at the end of the process."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if self._remover.stdin is not None:
            self._remover.stdin.close()


def sweep(parent: Path) -> None:
    """Remove this user's directories in `parent` whose maker has exited."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
