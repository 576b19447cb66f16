"""Data files whose rows are read by number, for training data that does not fit in memory.

jsonl: the offset of each line is kept, 16 bytes a row.  parquet: copied once, batch by batch, to an
uncompressed file in the cache, which the kernel maps into memory and evicts as needed.  json: an
array cannot be read in parts, so its rows stay in memory. Invariants: row n here is row n of
`files.read_placed`, with the same origin; memory grows by a few bytes per row of jsonl or parquet.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from array import array
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from async_rl.data.cache import build_once, cache_root
from async_rl.data.files import Placed, line_row, local_copy, read_placed, readable

_BATCH_ROWS = 1024


class Table(Protocol):
    """The rows of one file."""

    def __len__(self) -> int:
        """Their number."""

    def __getitem__(self, index: int, /) -> Placed:
        """The index-th, counted from 0, with its origin."""


def open_table(file: str, cache_dir: str | None) -> Table:
    """The rows of a file as its ending says. Raises DataError where it cannot be read."""
    suffix = PurePosixPath(file).suffix.lower()
    # An array of JSON cannot be read in parts.
    if suffix not in (".jsonl", ".parquet"):
        return list(read_placed(file, cache_dir=cache_dir))
    with readable(file):
        local = local_copy(file, cache_dir)
        if suffix == ".jsonl":
            return _Lines(file, local)
        return _Parquet(file, local, cache_root(cache_dir) / "data")
    raise AssertionError("readable turns each error into DataError")


class _Lines:
    def __init__(self, file: str, local: Path) -> None:
        self._file = file
        self._local = local
        # Arrays of machine integers: a Python list would take 72 bytes a row instead of 16.
        self._starts = array("q")
        self._numbers = array("q")
        start = 0
        with local.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Placed:
        origin = f"{self._file}, row {self._numbers[index]}"
        with self._local.open("rb") as handle:
            handle.seek(self._starts[index])
            return origin, line_row(origin, handle.readline())


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
        name = hashlib.sha256(
            f"{self._local.absolute()} {state.st_size} {state.st_mtime_ns}".encode()
        ).hexdigest()[:24]

        def copy(target: Path) -> None:
            with self._local.open("rb") as handle:
                # Without pre_buffer memory holds one batch, not a row group.
                source = parquet.ParquetFile(handle, pre_buffer=False)
                with (
                    pa.OSFile(str(target), "wb") as sink,
                    pa.ipc.new_file(sink, source.schema_arrow) as writer,
                ):
                    for batch in source.iter_batches(batch_size=_BATCH_ROWS):
                        writer.write_batch(batch)

        return build_once(self._directory / f"{name}.arrow", copy, on_wait=lambda _: None)
