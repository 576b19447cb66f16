"""Stored trajectories as rows for other tools: JSONL or Parquet. docs/operations.md describes the
columns.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from async_rl.buffer.store import browse
from async_rl.buffer.store.browse import Filter
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, Group
from async_rl.runs.samples import Decode

_ROWS_PER_PIECE = 256
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("group_id", pa.int64()),
        ("sample", pa.int32()),
        ("step", pa.int64()),
        ("state", pa.string()),
        ("prompt_id", pa.string()),
        ("data_source", pa.string()),
        ("generator", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("verdicts", pa.list_(pa.string())),
        ("is_passed", pa.bool_()),
        ("is_truncated", pa.bool_()),
        ("prompt_length", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("advantages", pa.list_(pa.float32())),
    ]
)
"""One row per sample. The four lists of tokens have one entry per token of prompt and response;
advantages one per response token, null unless a step with a critic stored them.
"""


@frozen
class Form:
    """A file format. stream: from rows to pieces of the file."""

    media_type: str
    stream: Callable[[Iterable[dict[str, Any]]], Iterator[bytes]]


def rows(run_dir: Path, decode: Decode, chosen: Filter) -> Iterator[dict[str, Any]]:
    """Yield the stored samples of all groups that pass the filter, the newest groups first; with
    `failed` only the samples that failed.
    """
    before = chosen.before
    while True:
        page = msgspec.structs.replace(chosen, stored=True, sort="newest", before=before)
        # Read the page into memory: a slow client must not keep a transaction of a live store open,
        # because the write-ahead log could then not be shortened.
        with reading(run_dir / STORE_FILE) as store:
            listed = browse.page_of(store, page, most=browse.PAGE)
            stored = [browse.trajectories(store, row.group_id) for row in listed]
            prompts = [browse.prompt_text(store, row.purpose, row.prompt_id) for row in listed]
        for row, group, prompt in zip(listed, stored, prompts, strict=True):
            if group is not None:
                facts = {"run": run_dir.name, "step": row.step, "state": row.state}
                for sample in _samples(facts | {"prompt": prompt}, *group, decode=decode):
                    if not (chosen.failed and sample["is_passed"]):
                        yield sample
        # A page that is not full is the last one.
        if len(listed) < browse.PAGE:
            return
        before = listed[-1].group_id


def _samples(
    facts: dict[str, Any], group: Group, advantages: FloatArray | None, *, decode: Decode
) -> Iterator[dict[str, Any]]:
    start = 0
    for index, sample in enumerate(group.trajectories):
        end = start + sample.response_length
        yield facts | {
            "group_id": group.group_id,
            "sample": index,
            "prompt_id": group.prompt_id,
            "data_source": group.data_source,
            "generator": group.generator,
            "response": decode(sample.token_ids[sample.prompt_length :].tolist()),
            "reward": sample.score.reward,
            "parts": sample.score.parts,
            "verdicts": [verdict.value for verdict in sample.score.verdicts],
            "is_passed": sample.score.is_passed,
            "is_truncated": sample.is_truncated,
            "prompt_length": sample.prompt_length,
            "token_ids": sample.token_ids.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "behavior_logprobs": sample.behavior_logprobs.tolist(),
            "versions": sample.versions.tolist(),
            "advantages": None if advantages is None else advantages[start:end].tolist(),
        }
        start = end


def _jsonl(samples: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for sample in samples:
        yield msgspec.json.encode(sample) + b"\n"


class _Pieces(io.BytesIO):
    """A file whose content is taken away piece by piece while it is written."""

    _num_taken = 0

    def tell(self) -> int:
        """Return the position in the whole file, because Parquet's index counts from its start."""
        return self._num_taken + super().tell()

    def take(self) -> bytes:
        """Return the bytes that were written since the last call."""
        taken = self.getvalue()
        self._num_taken += len(taken)
        self.seek(0)
        self.truncate()
        return taken


def _parquet(samples: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the file in pieces of some hundred rows, so that memory does not grow with the run."""
    pieces = _Pieces()
    remaining = iter(samples)
    with pq.ParquetWriter(pa.PythonFile(pieces, mode="w"), SCHEMA, compression="zstd") as writer:
        while piece := list(itertools.islice(remaining, _ROWS_PER_PIECE)):
            # Arrow builds a map from pairs.
            listed = [{**row, "parts": list(row["parts"].items())} for row in piece]
            writer.write_table(pa.Table.from_pylist(listed, schema=SCHEMA))
            # One row group per piece: Parquet keeps a row group in memory until it is written.
            yield pieces.take()
    yield pieces.take()


FORMS = {
    "jsonl": Form(media_type="application/x-ndjson", stream=_jsonl),
    "parquet": Form(media_type="application/vnd.apache.parquet", stream=_parquet),
}
