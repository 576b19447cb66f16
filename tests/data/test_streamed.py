"""Training files too large to be held: the same prompts as from memory, little kept, bad rows, one
copy for all processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data_support import make_config

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.data import corpus
from async_rl.data import prompts as prompts_of_files
from async_rl.data.files import open_table
from async_rl.data.prompts import load_train_prompts
from async_rl.data.streamed import StreamedPrompts
from async_rl.data.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(corpus.vocabulary_text(), 512)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"add {i} and {i % 7}", "answer": f"so #### {i + i % 7}", "id": i}
        for i in range(count)
    ]


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text(
        "\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def config_of(tmp_path: Path, *files: Path, **data: object) -> RunConfig:
    listed = ",".join(f"'{file}'" for file in files)
    more = [f"data.{name}={value}" for name, value in data.items()]
    return make_config(
        f"data.train_files=[{listed}]",
        *more,
    )


@pytest.fixture(autouse=True)
def few_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts_of_files, "MAX_ROWS_IN_MEMORY", 1000)


def test_streamed_prompts_are_those_that_would_be_held(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", list(rows(300)))
    table = tmp_path / "b.parquet"
    parquet.write_table(pa.Table.from_pylist(rows(2500)), table, row_group_size=700)
    streamed = load_train_prompts(config_of(tmp_path, lines, table), tokenizer)
    monkeypatch.setattr(prompts_of_files, "MAX_ROWS_IN_MEMORY", 100_000)
    held = load_train_prompts(config_of(tmp_path, lines, table), tokenizer)
    assert isinstance(streamed, StreamedPrompts)
    assert not isinstance(held, StreamedPrompts)
    assert len(held) == len(streamed) == 2800
    order = list(range(2800))
    random.Random(0).shuffle(order)
    for i in order:
        assert (held[i].prompt_id, held[i].text, held[i].problem) == (
            streamed[i].prompt_id,
            streamed[i].text,
            streamed[i].problem,
        )
        assert held[i].token_ids.tolist() == streamed[i].token_ids.tolist()
    with pytest.raises(IndexError):
        streamed[2800]


def test_a_second_start_finds_the_same_prompts_and_copies_nothing_again(
    tokenizer: Any, tmp_path: Path
) -> None:
    table = tmp_path / "b.parquet"
    parquet.write_table(pa.Table.from_pylist(rows(1500)), table)
    config = config_of(tmp_path, table)
    first = load_train_prompts(config, tokenizer)[1400]
    (copy,) = (tmp_path / "cache").rglob("*.arrow")
    written = copy.stat().st_mtime_ns
    assert load_train_prompts(config, tokenizer)[1400].prompt_id == first.prompt_id
    assert copy.stat().st_mtime_ns == written


@pytest.mark.covers("train_files: never whole in memory")
def test_a_large_file_is_never_in_memory(tokenizer: Any, tmp_path: Path) -> None:
    text = "y" * 2000
    table, count = tmp_path / "big.parquet", 20_000
    with parquet.ParquetWriter(
        table, pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    ) as writer:
        for start in range(0, count, 2000):
            part = [
                {"prompt": f"{i} {text}", "answer": "#### 1"} for i in range(start, start + 2000)
            ]
            writer.write_table(pa.Table.from_pylist(part, writer.schema))
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    prompts = load_train_prompts(config_of(tmp_path, table, truncation="left"), tokenizer)
    for i in range(0, count, 97):
        assert prompts[i].prompt_id == f"big/{i + 1}"
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count * len(text) == 40_000_000
    assert kept + pa.total_allocated_bytes() - before < 8_000_000


def test_a_bad_row_far_into_the_file_gives_its_place_to_the_next_or_is_told(
    tokenizer: Any, tmp_path: Path
) -> None:
    lines: list[Any] = list(rows(1200))
    lines[1100] = {"prompt": "no tests", "id": 1100}
    lines[1101] = "{broken"
    lines[1199] = {"prompt": "add 1 and 1 " * 400, "answer": "#### 2", "id": 1199}
    file = write_jsonl(tmp_path / "a.jsonl", lines)
    told: list[DataError] = []
    dropping = load_train_prompts(
        config_of(tmp_path, file, bad_rows="drop", truncation="drop"), tokenizer, told.append
    )
    assert [dropping[i].prompt_id for i in (1099, 1100, 1101, 1102, 1199)] == [
        "a/1099",
        "a/1102",
        "a/1102",
        "a/1102",
        "a/0",
    ]
    assert told == []
    strict = load_train_prompts(config_of(tmp_path, file), tokenizer, told.append)
    assert strict[1100].prompt_id == "a/1102"
    assert [str(error).partition(":")[0] for error in told] == [
        f"{file}, row 2201",
        f"{file}, row 2203",
    ]
    assert strict[1199].prompt_id == "a/0"
    assert "row 2399: " in str(told[-1])
    assert "data.max_prompt_tokens" in str(told[-1])


def test_a_bad_row_among_the_first_thousand_is_refused_before_the_run(
    tokenizer: Any, tmp_path: Path
) -> None:
    lines: list[Any] = list(rows(1200))
    lines[900] = {"prompt": "no tests", "id": 900}
    file = write_jsonl(tmp_path / "a.jsonl", lines)
    with pytest.raises(DataError, match=r"a\.jsonl, row 1801: no tests among"):
        load_train_prompts(config_of(tmp_path, file), tokenizer)
    assert len(load_train_prompts(config_of(tmp_path, file, bad_rows="drop"), tokenizer)) == 1200


def _fetch(url: str, cache: str, barrier: Any, found: Any) -> None:
    barrier.wait(60)
    os.environ["XDG_CACHE_HOME"] = cache
    num_rows = len(open_table(url))
    (path,) = (Path(cache) / "async_rl" / "data").glob("*.jsonl")
    found.put((str(path), os.stat(path).st_ino, num_rows))


@pytest.mark.covers("train_files, val_files: the cache's lock")
def test_processes_that_want_the_same_remote_file_copy_it_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", list(rows(2000)))
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(3), context.Queue()
    processes = [
        context.Process(
            target=_fetch, args=(f"file://{source}", str(tmp_path / "cache"), barrier, found)
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    results = {found.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(results) == 1, "another file was put in the place of the first"
    assert results.pop()[2] == 2000
    assert len(list((tmp_path / "cache" / "async_rl" / "data").glob("*.jsonl"))) == 1
