"""Data files as tables of rows: jsonl, parquet, json, and functions of a user that yield rows.

jsonl and parquet are read row by row. An array of json cannot be read in parts, so its rows are in
memory, as the rows of a function are.
Invariants: every row comes with its origin ("file, row n", counted from 1); nothing is skipped, a
row that cannot be read is a DataError; a remote file is copied once, under a lock, to the cache,
and again only if it changed.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from async_rl.config.data import is_source
from async_rl.config.plugins import DATA_SOURCE, load_function
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.data.cache import build_once, cache_root

Row = dict[str, Any]
Placed = tuple[str, Row | DataError]
"""A row, or why it cannot be read, with its origin."""
_BATCH_ROWS = 1024
"""Rows of Parquet in memory at one time: as Python objects a file takes several times its size."""


def open_table(file: str) -> Table:
    """Return the rows of a local path, an fsspec URL or a function. Raises DataError here or when a
    row is read.
    """
    if is_source(file):
        function = load_function("data.train_files or data.val_files", file, DATA_SOURCE)
        return _placed_rows(file, function())
    suffix = PurePosixPath(file).suffix.lower()
    if suffix not in _FORMATS:
        raise DataError(
            f"{file}: unknown kind of file {suffix!r}; give one of {', '.join(_FORMATS)}"
        )
    with readable(file):
        table = _FORMATS[suffix](file=file, local=_local_copy(file, suffix))
    return table


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
        matches = sorted(system.unstrip_protocol(name) for name in system.glob(path))
    return matches


@contextlib.contextmanager
def readable(file: str) -> Iterator[None]:
    """Turn errors of reading a file inside the block into DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: there is no such file; correct the path") from error
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
    )


def _placed_rows(file: str, rows: Iterable[Any]) -> list[Placed]:
    return [_placed(f"{file}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _placed(origin: str, row: Any) -> Placed:
    if isinstance(row, dict):
        return origin, row
    kind = type(row).__name__
    return origin, DataError(f"{origin}: a row must be an object with columns, this is a {kind}")


def _decode(origin: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{origin}: not valid JSON ({error})") from error


@frozen
class _Lines:
    """file: as the configuration names it; local: the path of the file or of its copy."""

    file: str
    local: Path

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def __iter__(self) -> Iterator[Placed]:
        for number, line in self._lines():
            origin = f"{self.file}, row {number}"
            try:
                yield _placed(origin, _decode(origin, line))
            except DataError as error:
                yield origin, error

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with readable(self.file), self.local.open("rb") as handle:
            # Editors and shells add empty lines at the end; they are not rows, but they count for
            # the row number that a person sees in an editor.
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield number, line


@frozen
class _Parquet(_Lines):
    """As _Lines."""

    def __len__(self) -> int:
        import pyarrow.parquet as parquet

        with readable(self.file):
            num_rows = int(parquet.read_metadata(self.local).num_rows)
        return num_rows

    def __iter__(self) -> Iterator[Placed]:
        import pyarrow.parquet as parquet

        # Without pre_buffer memory holds one batch, not a row group, which may be a gigabyte.
        with readable(self.file), parquet.ParquetFile(self.local, pre_buffer=False) as reader:
            batches = reader.iter_batches(batch_size=_BATCH_ROWS)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                yield f"{self.file}, row {number}", row


def _array(*, file: str, local: Path) -> list[Placed]:
    rows = _decode(file, local.read_bytes())
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: holds one {type(rows).__name__}, not an array of rows; write a json array, or"
            " one object per line as .jsonl"
        )
    return _placed_rows(file, rows)


Table = list[Placed] | _Lines
"""The rows of one file, which are read when they are iterated."""
_FORMATS: dict[str, Callable[..., Table]] = {
    ".jsonl": _Lines,
    ".json": _array,
    ".parquet": _Parquet,
}
