"""Prompts of the embedded task, and of rows of data files in every layout that is read."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from data_support import TESTS, load, make_tokenizer, write_jsonl

from async_rl.core.errors import DataError
from async_rl.core.types import AssertTest, CodeTest, StdinTest

ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<answer>{% endif %}"
)


@pytest.mark.covers("prompt_key", "verl's schema, data_source")
@pytest.mark.covers("input_output with fn_name", "input_output without fn_name")
@pytest.mark.parametrize("case", ROWS, ids=[case["name"] for case in ROWS])
def test_a_row_becomes_a_prompt_or_is_refused_with_its_place_and_the_remedy(
    tokenizer: Any, tmp_path: Path, case: dict[str, Any]
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", case["row"])
    settings = case.get("settings", ())
    if "refused" in case:
        with pytest.raises(DataError, match=r"x\.jsonl, row 1: " + case["refused"]):
            load(file, tokenizer, *settings)
        return
    [prompt] = load(file, tokenizer, *settings)
    assert prompt.problem.tests == msgspec.convert(
        case.get("tests", prompt.problem.tests), list[CodeTest]
    )
    assert prompt.problem.setup == case.get("setup", "")
    for field in ("text", "prompt_id", "data_source"):
        assert getattr(prompt, field) == case.get(field, getattr(prompt, field))
    assert tokenizer.decode(prompt.token_ids.tolist()) == prompt.text


@pytest.mark.covers("train_files, val_files: jsonl and parquet")
def test_parquet_rows_give_the_same_prompts_as_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"Task {i}", "tests": json.dumps(TESTS)} for i in range(5)]
    table = tmp_path / "a" / "x.parquet"
    table.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=2)
    from_jsonl = load(write_jsonl(tmp_path / "x.jsonl", *rows), tokenizer)
    assert [(p.prompt_id, p.text, p.problem) for p in load(table, tokenizer)] == [
        (p.prompt_id, p.text, p.problem) for p in from_jsonl
    ]
    # Structs of one column have the same fields in every row, absent ones as None.
    tests = [*TESTS, {"kind": "assert", "code": "assert f()"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "tests": tests}]), table)
    [prompt] = load(table, tokenizer)
    assert prompt.problem.tests == [StdinTest(input="1", output="2"), AssertTest(code="assert f()")]


@pytest.mark.covers("prompt_key: chats and strings")
def test_the_chat_template_wraps_strings_and_chats_and_opens_the_answer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = write_jsonl(
        tmp_path / "x.jsonl",
        {"prompt": "Hi", "tests": TESTS},
        {"prompt": chat, "test_list": ["assert g()"]},
    )
    first, second = load(file, tokenizer)
    assert first.text == "<user>Hi<answer>" == tokenizer.decode(first.token_ids.tolist())
    shown = "Hi\nYour code should pass these tests:\nassert g()"
    assert second.text == f"<system>Be brief.<user>{shown}<answer>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "no such file"),
        ("x.csv", b"a,b", "unknown kind of file '.csv'"),
        ("y.jsonl", b"not json\n", "y.jsonl, row 1: not valid JSON"),
        ("empty.jsonl", b"", "no rows"),
        ("*.jsonl", None, r"\*\.jsonl: no file matches this pattern; correct it"),
    ],
)
def test_an_unusable_file_is_named(
    tokenizer: Any, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name, tokenizer)
