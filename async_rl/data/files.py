"""Rows of data files: jsonl line by line, parquet by row group, a json array as a whole; local
files, patterns, or fsspec URLs.

Invariants: every row comes with its origin ("file, row n", counted from 1); nothing is skipped, a
row that cannot be read is a DataError; a remote file is copied once, under a lock, to the cache,
and again only if it changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec

from async_rl.config.plugins import DATA_SOURCE, is_plugin, load_function
from async_rl.core.errors import DataError
from async_rl.data.cache import build_once, cache_root

Row = dict[str, Any]
Placed = tuple[str, Row | DataError]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that becomes no prompt: why, with its origin; over_long: only because of its length."""

    reason: str
    is_over_long: bool


def read_rows(file: str, *, cache_dir: str | None = None) -> Iterator[tuple[str, Row]]:
    """(origin, row) of each row of `file`, a local path or any fsspec URL. Raises DataError."""
    for origin, row in read_placed(file, cache_dir=cache_dir):
        if isinstance(row, DataError):
            raise row
        yield origin, row


def read_placed(file: str, *, cache_dir: str | None) -> Iterator[Placed]:
    """As read_rows, but a row that cannot be read is its DataError, and the next one follows.
    Raises DataError for the file.
    """
    suffix = PurePosixPath(file).suffix.lower()
    # A file format first: the suffix of file.py:function is .py:function, which is none of them.
    reader = _READERS.get(suffix)
    if reader is None and is_plugin(file, DATA_SOURCE):
        yield from _rows_of_plugin(file)
        return
    if reader is None:
        raise DataError(
            f"{file}: unknown kind of file {suffix!r}; give one of {', '.join(_READERS)}"
        )
    with readable(file), local_copy(file, cache_dir).open("rb") as handle:
        yield from reader(file, handle)


def _rows_of_plugin(name: str) -> Iterator[Placed]:
    """Yield the rows of a data source, with their numbers in their origins."""
    source = load_function("data.train_files or data.val_files", name, DATA_SOURCE)
    for number, row in enumerate(source(), start=1):
        origin = f"{name}, row {number}"
        if isinstance(row, dict):
            yield origin, row
        else:
            yield origin, DataError(f"{origin}: is a {type(row).__name__}; a row must be a dict")


def local_copy(file: str, cache_dir: str | None) -> Path:
    """Return the path of the file itself, or of the local copy of an fsspec URL."""
    if "://" not in file:
        return Path(file)
    return _fetched(file, PurePosixPath(file).suffix.lower(), cache_root(cache_dir) / "data")


def matching_files(patterns: Sequence[str]) -> list[str]:
    """The files that paths, URLs and patterns name, in the order given, files of one pattern by
    name. Raises DataError.
    """
    files: list[str] = []
    for pattern in patterns:
        matches = _matches(pattern) if has_magic(pattern) else [pattern]
        if not matches:
            raise DataError(f"{pattern}: no file matches this pattern; correct it")
        # Overlapping patterns name a file twice; its rows would then have equal ids.
        files += [file for file in matches if file not in files]
    return files


def _matches(pattern: str) -> list[str]:
    if "://" not in pattern:
        return sorted(glob(pattern, recursive=True))
    import fsspec

    with readable(pattern):
        system, path = fsspec.core.url_to_fs(pattern)
        return sorted(system.unstrip_protocol(name) for name in system.glob(path))
    raise AssertionError("readable turns each error into DataError")


@contextlib.contextmanager
def readable(file: str) -> Iterator[None]:
    """Turn errors of reading a file inside the block into DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file; correct the path") from error
    # ImportError: fsspec needs a package per protocol. ValueError: an unknown protocol, or a file
    # that is not Parquet.
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__}: {error})") from error


def _fetched(url: str, suffix: str, directory: Path) -> Path:
    """The local copy of a remote file in the state it has now."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    # A changed file has another state, hence another name: its old copy is not read.
    name = hashlib.sha256(f"{url} {system.ukey(path)}".encode()).hexdigest()[:24]
    return build_once(
        directory / f"{name}{suffix}",
        lambda copy: system.get_file(path, str(copy)),
        on_wait=lambda lock: _log.info(
            "waiting for another process that copies %s (lock %s)", url, lock
        ),
    )


def _jsonl(file: str, handle: BinaryIO) -> Iterator[Placed]:
    for number, line in enumerate(handle, start=1):
        # Editors and shells add empty lines at the end; they are not rows, but they count for the
        # row number that a person sees in an editor.
        if line.strip():
            origin = f"{file}, row {number}"
            yield origin, line_row(origin, line)


def line_row(origin: str, line: bytes) -> Row | DataError:
    """The row of one line of jsonl, or why it is none."""
    try:
        return _object(origin, _decode(origin, line))
    except DataError as error:
        return error


def _json(file: str, handle: BinaryIO) -> Iterator[Placed]:
    rows = _decode(file, handle.read())
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: holds one {type(rows).__name__}, not an array of rows; write a json array, or"
            " one object per line as .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        origin = f"{file}, row {number}"
        yield origin, _object(origin, row)


def _parquet(file: str, handle: BinaryIO) -> Iterator[Placed]:
    import pyarrow.parquet as parquet

    number = 0
    # In batches: the rows of a whole file as Python objects take several times its size.
    for batch in parquet.ParquetFile(handle).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def _decode(origin: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{origin}: not valid JSON ({error})") from error


def _object(origin: str, row: Any) -> Row | DataError:
    if isinstance(row, dict):
        return row
    return DataError(
        f"{origin}: a row must be an object with columns, this is a {type(row).__name__}"
    )


_READERS: dict[str, Callable[[str, BinaryIO], Iterator[Placed]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
}
