"""The prompts of a run with their hidden tests: of the embedded task, or of data files.

Invariants
- Ids are unique; the same configuration and data have the same prompts in the same order.
- Training prompts are made row by row: beside the ids of the rows, memory holds one batch of them.
- Each row is a prompt, or the configuration leaves it out, which is logged; otherwise it fails the
  run.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.run import RunConfig
from async_rl.core.codec import encode
from async_rl.core.errors import ConfigError, DataError, PromptTooLong
from async_rl.core.os import sync
from async_rl.core.types import Prompt, Purpose
from async_rl.data.drafts import Draft, Drafter, Outcome
from async_rl.data.files import Table, matching_files, open_table
from async_rl.data.model_files import EMBEDDED
from async_rl.data.prompt_file import opened
from async_rl.data.tokenizer import load_tokenizer, spare_torch
from async_rl.protocol.base import message_schema

_BATCH_ROWS = 256
"""Rows tokenized together, on several cores. Larger batches are no faster and take more memory: the
tokens of a row are Python integers until it is written.
"""
_log = logging.getLogger(__name__)
_Tables = dict[str, Table]


def prepare_prompts(
    path: Path, config: RunConfig, model_path: Path, on_rows: Callable[[int, int], None]
) -> None:
    """Write the prompts of the run, unless the file has them already. Raises DataError.

    on_rows: called with the number of training rows that are written and the number that there are.
    """
    # All settings that the prompts depend on, and the fields of a prompt. The content of the files
    # is no part of it: a resumed run keeps its prompts if they change.
    sections = [part.model_dump_json() for part in (config.data, config.reward, config.rollout)]
    others = [config.model.path, config.sandbox.packages, config.evaluation.num_prompts]
    key = hashlib.sha256(repr([message_schema(), *sections, *others]).encode()).hexdigest()
    if _has_prompts(path, key):
        return
    path.unlink(missing_ok=True)
    tables = _train_tables(config)
    num_rows = _rows_of(tables)
    on_rows(0, num_rows)
    spare_torch(config)
    tokenizer = load_tokenizer(config, model_path)
    # The held-out prompts first: they are few, and a bad row among them fails the run.
    held_out = held_out_prompts(config, tokenizer)

    def train() -> Iterator[Prompt]:
        sources = set()
        for number, prompt in enumerate(_usable(tables, config, tokenizer)):
            if number % _BATCH_ROWS == 0:
                on_rows(number, num_rows)
            sources.add(prompt.data_source)
            yield prompt
        on_rows(num_rows, num_rows)  # also if many rows were left out
        weights = config.data.weights
        if weights and sources != weights.keys():
            raise DataError(
                f"data.weights has {', '.join(sorted(weights))}, the rows have the data sources"
                f" {', '.join(sorted(sources))}; give each of them a weight"
            )

    write_prompts(path, key, {Purpose.EVAL: held_out, Purpose.TRAIN: train()})


def write_prompts(path: Path, key: str, prompts: Mapping[Purpose, Iterable[Prompt]]) -> None:
    """Write the prompts row by row. key: names the settings that the prompts depend on."""
    partial = path.with_suffix(".partial")
    # The rest of a preparation that was killed.
    partial.unlink(missing_ok=True)
    # One transaction: a commit waits for the disk.
    with contextlib.closing(sqlite3.connect(partial)) as connection, connection:
        connection.execute("CREATE TABLE key (key TEXT)")
        connection.execute("INSERT INTO key VALUES (?)", (key,))
        for purpose, rows in prompts.items():
            # The data source first: SQLite reads a row from its start, and prompts are long.
            connection.execute(
                f"CREATE TABLE {purpose} (row INTEGER PRIMARY KEY, data_source TEXT, prompt BLOB)"
            )
            values = (
                (number, prompt.data_source, encode(prompt)) for number, prompt in enumerate(rows)
            )
            connection.executemany(f"INSERT INTO {purpose} VALUES (?, ?, ?)", values)
    partial.rename(path)
    sync(path.parent)


def _has_prompts(path: Path, key: str) -> bool:
    """Return whether the file has the prompts of these settings."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(opened(path)) as connection:
            return bool(connection.execute("SELECT key FROM key").fetchall() == [(key,)])
    except sqlite3.DatabaseError:
        return False  # damaged, so it is written again


def train_prompts(config: RunConfig, tokenizer: Any) -> Iterator[Prompt]:
    """Yield the training prompts. Raises DataError if a file or a row cannot be used."""
    return _usable(_train_tables(config), config, tokenizer)


def held_out_prompts(config: RunConfig, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of one evaluation, none if train_files come without val_files."""
    files = config.data.val_files
    # Held-out prompts of the embedded task would measure something the run does not train.
    if config.data.train_files and not files:
        return []
    tables = _tables_of(files or [embedded_rows("held_out")])
    # The first ones in every evaluation, so that its numbers can be compared over the run. Any
    # first prompts of the embedded task are a fair sample.
    return list(_usable(tables, config, tokenizer))[: config.evaluation.num_prompts or None]


def examined(patterns: Sequence[str], config: RunConfig, tokenizer: Any) -> Iterator[Outcome]:
    """Yield the outcome of every row of the files. Raises DataError if a file cannot be read, or if
    there are not rows.
    """
    return _outcomes(_tables_of(patterns), config, tokenizer)


def steps_of_epochs(config: RunConfig) -> int:
    """Return the steps after which every training row was issued data.epochs times, the last step
    filled up. Raises ConfigError.

    Rows that will be left out count too, because files are not checked here.
    """
    if config.data.epochs is None:
        raise ConfigError(
            "num_steps=null and data.epochs=null: nothing says how long the run is; set num_steps,"
            " or data.epochs=1"
        )
    try:
        num_rows = _rows_of(_train_tables(config))
    except DataError as error:
        raise ConfigError(f"num_steps=null: the rows cannot be counted: {error}") from error
    return max(math.ceil(config.data.epochs * num_rows / config.buffer.groups_per_step), 1)


def _train_tables(config: RunConfig) -> _Tables:
    return _tables_of(config.data.train_files or [embedded_rows("train")])


def embedded_rows(part: str) -> str:
    """Return the file of a part of the embedded task."""
    return str(EMBEDDED / part / "list_functions.parquet")


def _tables_of(patterns: Sequence[str]) -> _Tables:
    """Return the rows by file. Raises DataError if a file cannot be opened or there are none."""
    files = matching_files(patterns)
    tables = {file: open_table(file) for file in files}
    if not _rows_of(tables):
        raise DataError(f"{', '.join(files)}: no rows; give files with at least one prompt")

    return tables


def _rows_of(tables: _Tables) -> int:
    # Cheap in both large formats: the lines of jsonl, the footer of Parquet.
    return sum(map(len, tables.values()))


def _outcomes(tables: _Tables, config: RunConfig, tokenizer: Any) -> Iterator[Outcome]:
    """Yield the outcome of each row, in order."""
    drafter = Drafter(list(tables), config, tokenizer)
    drafts = (
        drafter.draft(file, number, placed)
        for file, table in tables.items()
        for number, placed in enumerate(table, start=1)
    )
    while batch := list(itertools.islice(drafts, _BATCH_ROWS)):
        encoded = drafter.encode([draft for draft in batch if isinstance(draft, Draft)])
        for draft in batch:
            yield next(encoded) if isinstance(draft, Draft) else (0, draft)


def _usable(tables: _Tables, config: RunConfig, tokenizer: Any) -> Iterator[Prompt]:
    """Yield the prompts. Raises DataError at the first row that the configuration refuses; it may
    leave such rows out instead, which is logged.
    """
    data = config.data
    limit = data.max_prompt_tokens
    num_prompts = 0
    num_cut = 0
    num_dropped = 0
    first_dropped = ""
    for num_tokens, outcome in _outcomes(tables, config, tokenizer):
        if isinstance(outcome, Prompt):
            num_prompts += 1
            num_cut += num_tokens > limit
            yield outcome
            continue
        is_over_long = isinstance(outcome, PromptTooLong)
        if (data.truncation if is_over_long else data.bad_rows) == "error":
            # The run's end should not wait for the rest of the rows; the command reads them all.
            raise DataError(f"{outcome} (async-rl data check lists every such row)")
        num_dropped += 1
        first_dropped = first_dropped or str(outcome)
    total = num_prompts + num_dropped
    if num_dropped:
        _log.warning("dropped %d of %d rows, the first: %s", num_dropped, total, first_dropped)
    if num_cut:
        _log.warning("cut %d of %d prompts to data.max_prompt_tokens=%d", num_cut, total, limit)
    if not num_prompts:
        raise DataError(f"none of {total} rows can be used, the first: {first_dropped}")
