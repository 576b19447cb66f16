"""Rows of data files: jsonl line by line, parquet row group by row group, a json array at once.

Invariants: every row comes with a place ("file, row n", counted from 1); nothing is skipped, what cannot be read is a DataError.
Used by prompts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import msgspec

from async_rl.errors import DataError

Row = dict[str, Any]


def read_rows(file: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of each row of `file`, a local path or any fsspec URL. Raises DataError."""
    import fsspec

    suffix = PurePosixPath(file).suffix.lower()
    reader = _READERS.get(suffix)
    if reader is None:
        raise DataError(f"{file}: unknown kind of file {suffix!r}; give one of {', '.join(_READERS)}")
    try:
        with fsspec.open(file, "rb") as handle:
            yield from reader(file, handle)
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file; correct data.train_files or data.val_files") from error
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__}: {error})") from error


def _jsonl(file: str, handle: BinaryIO) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(handle, start=1):
        if line.strip():
            place = f"{file}, row {number}"
            yield place, _object(place, _decode(place, line))


def _json(file: str, handle: BinaryIO) -> Iterator[tuple[str, Row]]:
    rows = _decode(file, handle.read())
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: holds one {type(rows).__name__}, not an array of rows; write a json array, or one object per line as .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        place = f"{file}, row {number}"
        yield place, _object(place, row)


def _parquet(file: str, handle: BinaryIO) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet as parquet

    number = 0
    for batch in parquet.ParquetFile(handle).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def _decode(place: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: no valid JSON ({error})") from error


def _object(place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be an object with columns, this is a {type(row).__name__}")
    return row


_READERS: dict[str, Callable[[str, BinaryIO], Iterator[tuple[str, Row]]]] = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
