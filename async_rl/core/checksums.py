"""Checksums of the files in a directory, in a file that `sha256sum -c` also reads, and of the
values in a row of a store.

A flipped bit in a checkpoint would otherwise load as a slightly different weight.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_rl.core.os import sync, sync_tree

SUMS_FILE = "sha256sums.txt"
_THREADS = 4
"""Hashing releases Python's lock. One thread hashes 1.7 GB/s (measured on two cores of an x86-64
server, zeros in memory), which is less than a fast disk reads.
"""


def checksum(*values: str | int | bytes | memoryview) -> int:
    """Return the CRC-32 of values in their order: it differs if one bit of them does."""
    result = 0
    for value in values:
        data = f"{value}\0".encode() if isinstance(value, str | int) else value
        result = zlib.crc32(data, result)
    return result


def write_sums(directory: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums of the files in the directory, by name."""
    lines = (f"{digest}  {name}\n" for name, digest in sums.items())
    (directory / SUMS_FILE).write_text("".join(lines))


def damage(directory: Path) -> str:
    """Return what differs from the directory's checksums as half a sentence; empty if nothing."""
    path = directory / SUMS_FILE
    try:
        # A flipped bit in the list itself must be reported as damage, not as a decoding error.
        lines = path.read_text(errors="replace").splitlines()
        actual = sums_of(directory)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            return f"{name} is missing"
        if expected.get(name) != actual[name]:
            return f"{name} does not have the checksum in {SUMS_FILE}"
    return "" if expected else f"{SUMS_FILE} is empty"


def sum_of(paths: Iterable[Path]) -> str:
    """Return one SHA-256 of the content of several files, in the order of their names, in
    hexadecimal.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        # A hash of hashes, because one hash of all content could use one thread only.
        return hashlib.sha256("".join(threads.map(digest, sorted(paths))).encode()).hexdigest()


def sums_of(directory: Path) -> dict[str, str]:
    """Return the checksums of all files in the directory, in any depth, by name."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != SUMS_FILE)
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(digest, paths)
        # Relative, so that a copy of the directory still matches.
        names = [str(path.relative_to(directory)) for path in paths]
        return dict(zip(names, digests, strict=True))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete(partial: Path, directory: Path, sums: Mapping[str, str]) -> None:
    """Give a directory its final name, with checksums and after all of it is on the disk."""
    write_sums(partial, sums)
    # The files must be on the disk before the name that says they are complete.
    sync_tree(partial)
    partial.rename(directory)
    sync(directory.parent)
