"""A disk below the run's directory: what is synced survives a power loss, of the rest anything may.

The product's own calls write real files. An audit hook of Python sees each file that is opened to
be written and each rename, deletion and new directory; `os.fsync` says what is on the disk.
- A file keeps its synced content. What was written since may be there whole, in part, or as zeros.
- A name is on the disk once its directory was synced; of the changes of names since then any prefix
  may be there, in their order.
- SQLite syncs its file before it starts its log anew. The log is a file as any other; SQLite stops
  reading at the first frame that is torn.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_DATABASES = ("run/store.sqlite", "run/store.sqlite-shm", "run/store.sqlite.lock")
"""Written by SQLite itself, which syncs the file, or rebuilt from it."""
_LOG = "run/store.sqlite-wal"
"""SQLite writes behind the last valid frame, also over frames that a power loss has torn."""
_real_fsync = os.fsync
_active: Disk | None = None


@dataclass(eq=False)
class _File:
    """synced: the content on the disk; None before the first sync."""

    synced: bytes | None = None


class Disk:
    """The names and contents below one directory. is_full: nothing more can be written.

    on_sync: called with the number of each sync before it has an effect.
    """

    def __init__(self, root: Path, rng: random.Random, on_sync: Callable[[int], None]) -> None:
        self._root = str(root)
        self._rng = rng
        self._on_sync = on_sync
        self.is_full = False
        self._live: dict[str, _File | None] = {}
        self._stored: dict[str, _File | None] = {}
        self._changes: list[tuple[str, Callable[[dict[str, _File | None]], None]]] = []
        self.num_syncs = 0

    def __enter__(self) -> Disk:
        global _active
        if not _hooked:
            sys.addaudithook(_hook)
            _hooked.append(True)
        self._start()
        _active = self
        return self

    def _start(self) -> None:
        """All that is there is on the disk."""
        root = Path(self._root)
        self._changes.clear()
        self._live = {
            str(path.relative_to(root)): None if path.is_dir() else _File(path.read_bytes())
            for path in root.rglob("*")
        }
        self._stored = dict(self._live)

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None

    # ---- what the product does

    def opened(self, path: str, mode: Any, flags: int) -> None:
        writes = flags & (os.O_WRONLY | os.O_RDWR) or (isinstance(mode, str) and mode[0] != "r")
        name = self._name(path)
        if not writes or name is None:
            return
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self.create(name)

    def create(self, name: str) -> None:
        """A file exists from now on, if it did not before."""
        if name not in self._live:
            file = _File()
            self._change(name, lambda names: names.__setitem__(name, file))

    def renamed(self, source: str, target: str) -> None:
        old, new = self._name(source), self._name(target)
        if old is None or new is None:
            return

        def move(names: dict[str, _File | None]) -> None:
            for name in [n for n in names if n == old or n.startswith(old + "/")]:
                names[new + name[len(old) :]] = names.pop(name)

        self._change(new, move)

    def removed(self, path: str) -> None:
        name = self._name(path)
        if name is not None:
            self._change(name, lambda names: names.pop(name, None))

    def made(self, path: str) -> None:
        name = self._name(path)
        if name is not None and name not in self._live and not Path(path).exists():
            self._change(name, lambda names: names.__setitem__(name, None))

    def synced(self, path: str) -> None:
        """A file, or the names in a directory, are on the disk."""
        self.num_syncs += 1
        self._on_sync(self.num_syncs)
        name = self._name(path)
        if name is None:
            return
        if os.path.isdir(path):
            left = []
            for directory, change in self._changes:
                if directory == name:
                    change(self._stored)
                else:
                    left.append((directory, change))
            self._changes = left
        else:
            file = self._live[name]
            assert file is not None
            file.synced = Path(path).read_bytes()

    def _change(self, name: str, change: Callable[[dict[str, _File | None]], None]) -> None:
        change(self._live)
        self._changes.append((os.path.dirname(name), change))

    def _name(self, path: str) -> str | None:
        path = os.fspath(path)
        if not isinstance(path, str) or not path.startswith(self._root):
            return None
        name = path[len(self._root) :].strip("/")
        return None if name in _DATABASES else name

    # ---- power loss

    def image(self) -> dict[str, bytes | None]:
        """Return contents by name after a power loss now; None for a directory."""
        names = dict(self._stored)
        for _, change in self._changes[: self._rng.randint(0, len(self._changes))]:
            change(names)
        of_file = {id(file): name for name, file in self._live.items() if file is not None}
        image: dict[str, bytes | None] = {}
        for name, file in names.items():
            current = None if file is None else of_file.get(id(file))
            content = self._read(current) if current is not None else b""
            is_log = name == _LOG
            image[name] = None if file is None else self._survives(file, content, is_log=is_log)
        for name in _DATABASES[:1]:
            if (Path(self._root) / name).exists():
                image[name] = self._read(name)
        return image

    def _survives(self, file: _File, content: bytes, *, is_log: bool) -> bytes:
        synced = file.synced
        if content == synced:
            return content
        old = synced if synced is not None else b""
        cut = self._rng.randint(0, len(content))
        kinds = [content, old, content[:cut]]
        if content.startswith(old) or is_log:
            # Written in place: the disk has what both contents begin with.
            cut = self._rng.randint(_num_same(old, content), len(content))
            kinds = [content, old, content[:cut], content[:cut] + bytes(len(content) - cut)]
        return self._rng.choice(kinds)

    def _read(self, name: str) -> bytes:
        try:
            return (Path(self._root) / name).read_bytes()
        except OSError:
            return b""

    def restart(self, image: dict[str, bytes | None]) -> None:
        """Make the directory what the image says; all of it is on the disk then."""
        global _active
        _active = None
        root = Path(self._root)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for name, content in sorted(image.items()):
            path = root / name
            # A directory whose own name was lost has lost its content.
            if not path.parent.is_dir():
                continue
            if content is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content)
        self._start()
        _active = self


def _num_same(old: bytes, new: bytes) -> int:
    """The number of bytes that both begin with."""
    length = min(len(old), len(new))
    differs = np.frombuffer(old, np.uint8)[:length] != np.frombuffer(new, np.uint8)[:length]
    return int(differs.argmax()) if differs.any() else length


_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    disk = _active
    if disk is None:
        return
    match event:
        case "open" if isinstance(arguments[0], str):
            disk.opened(*arguments)
        case "os.rename":
            disk.renamed(os.fspath(arguments[0]), os.fspath(arguments[1]))
        case "os.remove" | "os.rmdir":
            # shutil.rmtree removes by name within an open directory.
            path, at = arguments
            disk.removed(
                os.path.join(os.readlink(f"/proc/self/fd/{at}"), path) if at != -1 else path
            )
        case "os.mkdir":
            disk.made(os.fspath(arguments[0]))


def fsync(number: Any) -> None:
    """As os.fsync, without waiting for a disk."""
    number = number if isinstance(number, int) else number.fileno()
    if _active is None:
        _real_fsync(number)
    else:
        _active.synced(os.readlink(f"/proc/self/fd/{number}"))
