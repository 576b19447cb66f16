"""Compiled programs by content: in memory, and in a directory that outlives the process.

Invariants: a key names the source, the compiler's version and its arguments, so a program only gets
what its own source became; a file is written next to its place and renamed, and starts with the
digest of its content, so a torn or changed file is never run; nothing in a jail can see the
directory; it is bounded in size, and the files that were used last stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections import OrderedDict
from pathlib import Path

MAX_BYTES = 1 << 30
_MAX_MEMORY_BYTES = 64 << 20
_DIGEST_BYTES = 32
_SUFFIX = ".program"


class Binaries:
    """The cache. directory: None keeps programs in memory only.

    Also None in effect if the directory cannot be made, or if another user could write to it.
    """

    def __init__(self, directory: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory if directory and _is_private(directory) else None
        self._max_bytes = max_bytes
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The program, or None."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        content = self._read(key)
        if content is not None:
            self._remember(key, content)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep a program. A directory that cannot be written keeps nothing."""
        self._remember(key, content)
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            self._write(self._directory, key, content)
            self._evict(self._directory)

    def _remember(self, key: str, content: bytes) -> None:
        self._memory_bytes += len(content) - len(self._memory.pop(key, b""))
        self._memory[key] = content
        while self._memory_bytes > _MAX_MEMORY_BYTES and len(self._memory) > 1:
            _, dropped = self._memory.popitem(last=False)
            self._memory_bytes -= len(dropped)

    def _read(self, key: str) -> bytes | None:
        if self._directory is None:
            return None
        path = self._directory / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
            digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != digest:
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        return content

    def _write(self, directory: Path, key: str, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(name, directory / f"{key}{_SUFFIX}")
        except BaseException:
            os.unlink(name)
            raise

    def _evict(self, directory: Path) -> None:
        """Remove the files that were used longest ago, until the others fit."""
        found = []
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                state = entry.stat()
                found.append((state.st_mtime_ns, state.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def _is_private(directory: Path) -> bool:
    """Make the directory; True if only this user can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat(follow_symlinks=False)
    except OSError:
        return False
    is_open = bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not is_open


def key_of(*parts: str) -> str:
    """The key of a program that these texts determine."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()
