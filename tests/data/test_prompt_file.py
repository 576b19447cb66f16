"""The prompts of a run: in a file at every start and at any size, in an order that is a function of
the position.
"""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data_support import make_config, make_tokenizer, write_jsonl

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.types import Prompt, Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, PromptOrder, RunPrompts, open_prompts
from async_rl.data.prompts import held_out_prompts, prepare_prompts, train_prompts
from async_rl.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def imports_of_torch_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.data.prompts.spare_torch", lambda _: None)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"add {i} and {i % 7}", "answer": f"so #### {i + i % 7}", "id": i}
        for i in range(count)
    ]


def config_of(*files: Path, **settings: object) -> RunConfig:
    listed = ",".join(f"'{file}'" for file in files)
    more = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return make_config(f"data.train_files=[{listed}]", "data.order=sequential", *more)


def prepared(run_dir: Path, config: RunConfig, model: Path) -> RunPrompts:
    prepare_prompts(run_dir / PROMPTS_FILE, config, model, lambda *_: None)
    return open_prompts(run_dir / PROMPTS_FILE, config, vocabulary_size=1)


def fields(prompt: Prompt) -> tuple[object, ...]:
    return prompt.prompt_id, prompt.text, prompt.token_ids.tolist(), prompt.problem


def test_the_file_has_the_prompts_of_all_files_in_their_order(tmp_path: Path, model: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", *rows(30))
    table = tmp_path / "b.parquet"
    parquet.write_table(pa.Table.from_pylist(rows(1100)), table, row_group_size=400)
    config = config_of(lines, table, data__val_files=f"['{lines}']", evaluation__num_prompts=7)
    prompts = prepared(tmp_path, config, model)
    tokenizer = load_tokenizer(config, model)
    held = list(train_prompts(config, tokenizer))
    assert len(held) == len(prompts.order.active) == 1130
    for i in reversed(range(1130)):
        assert fields(prompts.prompt(Purpose.TRAIN, i)) == fields(held[i])
    held_out = held_out_prompts(config, tokenizer)
    assert prompts.num_held_out == len(held_out) == 7
    assert fields(prompts.prompt(Purpose.EVAL, 6)) == fields(held_out[6])
    assert held_out_prompts(config_of(lines), tokenizer) == []


def test_a_resumed_run_reads_the_data_again_only_if_its_settings_change_prompts(
    tmp_path: Path, model: Path
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", *rows(5))
    first = fields(prepared(tmp_path, config_of(file), model).prompt(Purpose.TRAIN, 4))
    write_jsonl(file, *rows(4), {"prompt": "other", "answer": "#### 1", "id": 4})
    again = prepared(tmp_path, config_of(file), model).prompt(Purpose.TRAIN, 4)
    assert fields(again) == first
    assert again.problem.row == ""
    (tmp_path / "style.py").write_text("def score(sample):\n    return 1.0\n")
    changed = config_of(file, reward__terms__style=f"{tmp_path}/style.py:score")
    prompt = prepared(tmp_path, changed, model).prompt(Purpose.TRAIN, 4)
    assert prompt.text == "other\n"
    assert prompt.problem.row


def test_data_sources_have_weights_and_each_needs_one(tmp_path: Path, model: Path) -> None:
    named = [{**row, "data_source": "ab"[row["id"] > 1]} for row in rows(8)]
    file = write_jsonl(tmp_path / "a.jsonl", *named)
    config = config_of(file, data__order="shuffled", data__weights="{a: 3, b: 1}")
    prompts = prepared(tmp_path, config, model)
    epoch = [prompts.prompt(Purpose.TRAIN, k).data_source for k in range(8)]
    assert sorted(epoch) == [*"aaaaaabb"]
    for weights, expected in (("{a: 1}", "has a,"), ("{a: 1, b: 1, c: 1}", "has a, b, c,")):
        config = config_of(file, data__order="shuffled", data__weights=weights)
        with pytest.raises(DataError, match=rf"{expected} the rows have the data sources a, b;"):
            prepared(tmp_path, config, model)


def test_damaged_and_unfinished_files_are_replaced(tmp_path: Path, model: Path) -> None:
    for name in (PROMPTS_FILE, "prompts.partial"):
        (tmp_path / name).write_bytes(b"SQLite format 3\0 and no more")
    config = config_of(write_jsonl(tmp_path / "a.jsonl", *rows(5)))
    assert prepared(tmp_path, config, model).prompt(Purpose.TRAIN, 4).prompt_id == "a/4"
    assert not (tmp_path / "prompts.partial").exists()


@pytest.mark.covers("train_files: never whole in memory")
def test_a_large_file_is_never_in_memory(tmp_path: Path, model: Path) -> None:
    # A prompt has the whole row where a function scores it; tokens would take longer.
    text = "y" * 4000
    table, count = tmp_path / "big.parquet", 2_000
    names = ("prompt", "answer", "notes")
    with parquet.ParquetWriter(table, pa.schema([(n, pa.string()) for n in names])) as writer:
        for start in range(0, count, 500):
            part = [
                {"prompt": f"{i}", "answer": "#### 1", "notes": f"{i}{text}"}
                for i in range(start, start + 500)
            ]
            writer.write_table(pa.Table.from_pylist(part, writer.schema))
    (tmp_path / "style.py").write_text("def score(sample):\n    return 1.0\n")
    config = config_of(table, reward__terms__style=f"{tmp_path}/style.py:score")
    load_tokenizer(config, model)  # its imports are not of the data
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    prompts = prepared(tmp_path, config, model)
    for i in range(0, count, 97):
        assert f'"notes":"{i}yy' in prompts.prompt(Purpose.TRAIN, i).problem.row
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count * len(text) == 8_000_000
    assert kept + pa.total_allocated_bytes() - before < 2_000_000
    assert most < 7_000_000


def test_a_bad_row_far_into_the_file_is_left_out_or_ends_it(tmp_path: Path, model: Path) -> None:
    lines: list[Any] = list(rows(1200))
    lines[1100] = {"prompt": "no tests", "id": 1100}
    lines[1101] = "{broken"
    lines[1199] = {"prompt": "add 1 and 1 " * 400, "answer": "#### 2", "id": 1199}
    # An empty line is no row, and counts as an editor counts lines.
    file = write_jsonl(tmp_path / "a.jsonl", "", *lines)
    dropping = config_of(file, data__bad_rows="drop", data__truncation="drop")
    prompts = prepared(tmp_path, dropping, model)
    assert len(prompts.order.active) == 1197
    ids = [prompts.prompt(Purpose.TRAIN, i).prompt_id for i in (1099, 1100)]
    assert ids == ["a/1099", "a/1102"]
    for settings, row in (({}, 1102), ({"data__bad_rows": "drop"}, 1201)):
        with pytest.raises(DataError, match=rf"a\.jsonl, row {row}: "):
            prepared(tmp_path, config_of(file, **settings), model)
        assert not (tmp_path / PROMPTS_FILE).exists()


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own_seed_and_number() -> None:
    order = PromptOrder(3, 50)
    epochs = [[order.index(epoch * 50 + i) for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    other = [PromptOrder(1, 50).index(k) for k in range(50)]
    assert len({tuple(epoch) for epoch in [*epochs, other, range(50)]}) == 6
    # Whatever was requested before.
    wanted = [epochs[2][20], epochs[0][3], epochs[0][0]]
    assert [PromptOrder(3, 50).index(k) for k in (120, 3, 0)] == wanted


def test_a_source_has_its_share_of_each_epoch_and_its_prompts_take_turns() -> None:
    sources = [(np.arange(30), 1.0), (np.arange(30, 40), 3.0)]
    order = PromptOrder(3, 40, sources=sources)
    epochs = [[order.index(epoch * 40 + i) for i in range(40)] for epoch in range(4)]
    for epoch in epochs:
        # Ten of the 30 prompts of the first source, and each of the ten others three times.
        assert Counter(row >= 30 for row in epoch) == {False: 10, True: 30}
        assert set(Counter(row for row in epoch if row >= 30).values()) == {3}
    first = [row for epoch in epochs[:3] for row in epoch if row < 30]
    assert sorted(first) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = PromptOrder(3, 40, sources=sources)
    assert [other.index(k) for k in (120, 3)] == [epochs[3][0], epochs[0][3]]


def test_a_chosen_row_replaces_that_of_the_order_and_no_other() -> None:
    order, plain = PromptOrder(0, 6), PromptOrder(0, 6)
    order.choose(4, [1, 1])
    expected = [*(plain.index(k) for k in range(4)), 1, 1, plain.index(6)]
    assert [order.index(k) for k in range(7)] == expected
    assert order.drawn(4) == plain.index(4)
