"""Data files as tables of rows: jsonl, parquet, json, and functions of a user that yield rows.

A table is read from its start, or by row number where the data does not fit in memory.  jsonl: the
offset of each line is kept, 16 bytes a row.  parquet: read by number from a copy in the cache,
uncompressed, which the kernel maps into memory and evicts as needed.  json: an array cannot be read
in parts, so its rows are in memory, as the rows of a function are.
Invariants: every row comes with its origin ("file, row n", counted from 1); nothing is skipped, a
row that cannot be read is a DataError; both ways of reading return the same rows; a remote file is
copied once, under a lock, to the cache, and again only if it changed.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec

from async_rl.config.plugins import DATA_SOURCE, is_plugin, load_function
from async_rl.core.errors import DataError
from async_rl.data.cache import build_once, cache_root

Row = dict[str, Any]
Placed = tuple[str, Row | DataError]
"""A row, or why it cannot be read, with its origin."""
_SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_ROWS = 1024
"""Rows of Parquet in memory at one time: as Python objects a file takes several times its size."""
_log = logging.getLogger(__name__)


class Table(Protocol):
    """The rows of one file."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Placed:
        """Return the index-th row, counted from 0."""

    def __iter__(self) -> Iterator[Placed]:
        """Yield all rows in order."""


def open_table(file: str) -> Table:
    """Return the rows of a local path, an fsspec URL or a function. Raises DataError here or when a
    row is read.
    """
    suffix = PurePosixPath(file).suffix.lower()
    # A file format first: the suffix of file.py:function is .py:function, which is none of them.
    if suffix not in _SUFFIXES and is_plugin(file, DATA_SOURCE):
        return list(_rows_of_plugin(file))
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{file}: unknown kind of file {suffix!r}; give one of {', '.join(_SUFFIXES)}"
        )
    with readable(file):
        local = _local_copy(file, suffix)
        match suffix:
            case ".jsonl":
                return _Lines(file, local)
            case ".parquet":
                return _Parquet(file, local, cache_root() / "data")
        return list(_json(file, local.read_bytes()))
    raise AssertionError("readable turns each error into DataError")


def read_rows(file: str) -> Iterator[tuple[str, Row]]:
    """Yield (origin, row) of each row of a file. Raises DataError, also for a bad row."""
    for origin, row in open_table(file):
        if isinstance(row, DataError):
            raise row
        yield origin, row


def matching_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that paths, URLs and patterns name, in the order given, and the files of one
    pattern by name. Raises DataError.
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


def _local_copy(file: str, suffix: str) -> Path:
    """Return the path of the file itself, or of a copy of a remote file in its present state."""
    if "://" not in file:
        return Path(file)
    import fsspec

    system, path = fsspec.core.url_to_fs(file)
    # A changed file has another state, hence another name: its old copy is not read.
    name = hashlib.sha256(f"{file} {system.ukey(path)}".encode()).hexdigest()[:24]
    return build_once(
        cache_root() / "data" / f"{name}{suffix}",
        lambda copy: system.get_file(path, str(copy)),
        on_wait=lambda lock: _log.info(
            "waiting for another process that copies %s (lock %s)", file, lock
        ),
    )


def _rows_of_plugin(name: str) -> Iterator[Placed]:
    source = load_function("data.train_files or data.val_files", name, DATA_SOURCE)
    for number, row in enumerate(source(), start=1):
        origin = f"{name}, row {number}"
        if isinstance(row, dict):
            yield origin, row
        else:
            yield origin, DataError(f"{origin}: is a {type(row).__name__}; a row must be a dict")


def _json(file: str, data: bytes) -> Iterator[Placed]:
    rows = _decode(file, data)
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: holds one {type(rows).__name__}, not an array of rows; write a json array, or"
            " one object per line as .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield _placed(f"{file}, row {number}", row)


def _placed(origin: str, row: Any) -> Placed:
    if isinstance(row, dict):
        return origin, row
    kind = type(row).__name__
    return origin, DataError(f"{origin}: a row must be an object with columns, this is a {kind}")


def _decode(origin: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{origin}: not valid JSON ({error})") from error


class _Lines:
    def __init__(self, file: str, local: Path) -> None:
        self._file = file
        self._local = local

    def __len__(self) -> int:
        return len(self._index[0])

    def __getitem__(self, index: int) -> Placed:
        starts, numbers = self._index
        with self._local.open("rb") as handle:
            handle.seek(starts[index])
            return self._placed(numbers[index], handle.readline())

    def __iter__(self) -> Iterator[Placed]:
        for number, line in self._lines():
            if line.strip():
                yield self._placed(number, line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with readable(self._file), self._local.open("rb") as handle:
            # Editors and shells add empty lines at the end; they are not rows, but they count for
            # the row number that a person sees in an editor.
            yield from enumerate(handle, start=1)

    def _placed(self, number: int, line: bytes) -> Placed:
        origin = f"{self._file}, row {number}"
        try:
            return _placed(origin, _decode(origin, line))
        except DataError as error:
            return origin, error

    @functools.cached_property
    def _index(self) -> tuple[array[int], array[int]]:
        """The offset and the line number of each row."""
        # Arrays of machine integers: a Python list would take 72 bytes a row instead of 16.
        starts = array("q")
        numbers = array("q")
        start = 0
        for number, line in self._lines():
            if line.strip():
                starts.append(start)
                numbers.append(number)
            start += len(line)
        return starts, numbers


class _Parquet:
    def __init__(self, file: str, local: Path, directory: Path) -> None:
        import pyarrow.parquet as parquet

        self._file = file
        self._local = local
        self._directory = directory
        with local.open("rb") as handle:
            self._num_rows = int(parquet.ParquetFile(handle).metadata.num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Placed:
        reader, ends = self._batches
        # Batches of one file may differ in length, so the number is not index // _BATCH_ROWS.
        number = bisect.bisect_right(ends, index)
        # The file is mapped into memory, so this reads only the pages of one batch.
        batch = reader.get_batch(number)
        row = index - (ends[number] - batch.num_rows)
        return f"{self._file}, row {index + 1}", batch.slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Placed]:
        number = 0
        with readable(self._file), self._local.open("rb") as handle:
            for batch in _batches_of(handle):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{self._file}, row {number}", row

    @functools.cached_property
    def _batches(self) -> tuple[Any, list[int]]:
        """The mapped copy, and the number of rows up to the end of each of its batches."""
        import pyarrow as pa

        with readable(self._file):
            reader = pa.ipc.open_file(pa.memory_map(str(self._copy())))
        ends = []
        total = 0
        for number in range(reader.num_record_batches):
            total += reader.get_batch(number).num_rows
            ends.append(total)
        return reader, ends

    def _copy(self) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        state = self._local.stat()
        # A changed file gets another copy.
        key = f"{self._local.absolute()} {state.st_size} {state.st_mtime_ns}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24]

        def copy(target: Path) -> None:
            with self._local.open("rb") as handle:
                schema = parquet.ParquetFile(handle).schema_arrow
                with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                    for batch in _batches_of(handle):
                        writer.write_batch(batch)

        return build_once(self._directory / f"{name}.arrow", copy, on_wait=lambda _: None)


def _batches_of(handle: Any) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    # Without pre_buffer memory holds one batch, not a row group, which may be a gigabyte.
    yield from parquet.ParquetFile(handle, pre_buffer=False).iter_batches(batch_size=_BATCH_ROWS)
