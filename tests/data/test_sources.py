"""Sources and selection of rows: patterns, URLs, ids, metadata, lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from data_support import make_config

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.types import AnswerTest, Prompt, StdinTest
from async_rl.data import corpus, drafts
from async_rl.data.drafts import Rejected, filled, fitted
from async_rl.data.files import matching_files, read_rows
from async_rl.data.prompts import examined, train_prompts
from async_rl.data.tokenizer import build_tokenizer

TESTS = [{"kind": "stdin", "input": "1", "output": "2"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(corpus.vocabulary_text(), 512)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(pattern: object, tokenizer: Any, *overrides: str) -> list[Prompt]:
    config = make_config(
        f"data.train_files=['{pattern}']", "data.max_prompt_tokens=500", *overrides
    )
    return list(train_prompts(config, tokenizer))


def rejected_rows(path: Path, config: RunConfig, tokenizer: Any) -> list[Rejected]:
    outcomes = examined([str(path)], config, tokenizer)
    return [outcome for _, outcome in outcomes if isinstance(outcome, Rejected)]


def words(prompts: list[Prompt]) -> list[str]:
    return [prompt.text.strip() for prompt in prompts]


@pytest.mark.covers("train_files, val_files: one or several")
def test_a_pattern_names_its_files_in_order_and_none_twice(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", {"prompt": name, "tests": TESTS})
    assert words(load(tmp_path / "*.jsonl", tokenizer)) == ["a", "b", "c"]
    twice = matching_files([str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl")])
    assert [Path(file).stem for file in twice] == ["b", "a", "c"]


def test_a_pattern_without_files_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\*\.jsonl: no file matches this pattern; correct it"):
        load(tmp_path / "*.jsonl", tokenizer)


def test_files_of_one_name_in_two_folders_do_not_share_ids(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("x", "y"):
        write(tmp_path / name / "train.jsonl", {"prompt": name, "tests": TESTS})
    assert [prompt.prompt_id for prompt in load(tmp_path / "*" / "*.jsonl", tokenizer)] == [
        "x/train/1",
        "y/train/1",
    ]


@pytest.mark.covers("train_files, val_files: URLs in a cache")
def test_a_remote_file_is_copied_once_and_again_only_when_it_changed(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    url = "memory://bucket/part-0.jsonl"
    copied: list[str] = []
    get_file = type(memory).get_file

    def counting(self: Any, path: str, target: str, **options: Any) -> None:
        copied.append(path)
        get_file(self, path, target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(type(memory), "get_file", counting)
        memory.pipe_file("/bucket/part-0.jsonl", b'{"a": 1}\n')
        assert [row for _, row in read_rows(url)] == [{"a": 1}]
        assert list(read_rows(url)) == [(f"{url}, row 1", {"a": 1})]
        assert len(copied) == 1
        memory.pipe_file("/bucket/part-0.jsonl", b'{"a": 2}\n')
        assert [row for _, row in read_rows(url)] == [{"a": 2}]
        assert len(copied) == 2
    assert matching_files(["memory://bucket/part-*.jsonl"]) == [
        url.replace("memory://", "memory:///")
    ]
    memory.rm("/bucket", recursive=True)


def test_an_absent_remote_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"memory://bucket/none.jsonl: there is no such file"):
        list(read_rows("memory://bucket/none.jsonl"))


@pytest.mark.covers("max_prompt_length, truncation")
@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("error", None),
        ("drop", None),
        ("left", [3, 4, 5]),
        ("right", [1, 2, 3]),
        ("middle", [1, 4, 5]),
    ],
)
def test_each_truncation_keeps_its_own_tokens(mode: Any, kept: list[int] | None) -> None:
    assert fitted([1, 2, 3, 4, 5], 3, mode) == kept
    assert fitted([1, 2, 3], 3, mode) == [1, 2, 3]
    assert fitted([1, 2], 1, "middle") == [2]


def test_cut_prompts_have_the_text_of_their_tokens_and_are_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "first " + "x " * 600 + "last", "tests": TESTS})
    [left] = load(path, tokenizer, "data.truncation=left")
    [right] = load(path, tokenizer, "data.truncation=right")
    [middle] = load(path, tokenizer, "data.truncation=middle")
    assert [("first" in p.text, "last" in p.text) for p in (left, right, middle)] == [
        (False, True),
        (True, False),
        (True, True),
    ]
    for prompt in (left, right, middle):
        assert len(prompt.token_ids) == 500
        assert prompt.text == tokenizer.decode(prompt.token_ids.tolist())
    assert "cut 1 of 1 prompts to data.max_prompt_tokens=500" in caplog.text


@pytest.mark.covers("fill_to_max_length")
def test_filled_prompts_all_have_the_longest_length_and_end_as_they_did(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "x.jsonl", {"prompt": "a b", "tests": TESTS}, {"prompt": "c", "tests": TESTS}
    )
    plain, full = load(path, tokenizer), load(path, tokenizer, "data.longest=prompts")
    assert [len(prompt.token_ids) for prompt in full] == [500, 500]
    for short, long in zip(plain, full, strict=True):
        assert long.token_ids[-len(short.token_ids) :].tolist() == short.token_ids.tolist()
    assert filled([1, 2, 3], 5) == [2, 3, 1, 2, 3]


@pytest.mark.covers("bad rows")
def test_bad_rows_are_refused_with_their_number_or_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"prompt": "good", "tests": TESTS},
        {"prompt": "no tests"},
        {"tests": TESTS},
    )
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(
        DataError,
        match=(r"x.jsonl, row 2: no tests among .* \(async-rl data check lists every such row\)"),
    ):
        load(path, tokenizer)
    assert words(load(path, tokenizer, "data.bad_rows=drop")) == ["good"]
    assert "dropped 3 of 4 rows that cannot be used, the first: " in caplog.text
    config = make_config(f"data.train_files=[{path}]")
    reasons = [
        rejected.reason.partition("x.jsonl, ")[2]
        for rejected in rejected_rows(path, config, tokenizer)
    ]
    assert [reason[:18] for reason in reasons] == [
        "row 2: no tests am",
        "row 3: no column '",
        "row 4: not valid J",
    ]


def test_bad_rows_and_over_long_prompts_are_told_apart(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"prompt": "good", "tests": TESTS},
        {"prompt": "x " * 600, "tests": TESTS},
        {"prompt": "bad"},
    )
    with pytest.raises(DataError, match="row 3"):
        load(path, tokenizer, "data.truncation=drop")
    with pytest.raises(DataError, match="row 2"):
        load(path, tokenizer, "data.bad_rows=drop")
    assert words(load(path, tokenizer, "data.bad_rows=drop", "data.truncation=drop")) == ["good"]


@pytest.mark.covers("prompt_id_key, max_prompt_id_length")
def test_the_id_column_can_be_chosen_and_over_long_ids_are_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "p", "id": 1, "name": "n" * 30, "tests": TESTS})
    assert [p.prompt_id for p in load(path, tokenizer)] == ["x/1"]
    assert [p.prompt_id for p in load(path, tokenizer, "data.id_key=name")] == ["x/" + "n" * 30]
    monkeypatch.setattr(drafts, "MAX_ID_LENGTH", 29)
    with pytest.raises(DataError, match=r"row 1: the id 'nnn.* has 30 characters, over 29"):
        load(path, tokenizer, "data.id_key=name")
    with pytest.raises(DataError, match=r"row 1: no column 'other'.*set data.id_key"):
        load(path, tokenizer, "data.id_key=other")


@pytest.mark.covers("AReaL's code data, REAL_CODE_METADATA_PATH")
def test_areal_rows_find_their_tests_in_the_metadata_file(tokenizer: Any, tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    metadata = write(
        tmp_path / "code.jsonl",
        {"query_id": "q1", "input_output": tests, "solutions": []},
        {"id": "q0", "input_output": "{"},
    )
    path = write(tmp_path / "x.jsonl", {"question": "Do it", "query_id": "q1", "scores": [1.0]})
    [prompt] = load(path, tokenizer, f"data.metadata_file={metadata}")
    assert (prompt.text, prompt.prompt_id, prompt.problem.tests) == (
        "Do it\n",
        "x/q1",
        [StdinTest(input="1\n", output="2\n")],
    )
    with pytest.raises(DataError, match="row 1: no tests among"):
        load(path, tokenizer)
    other = write(tmp_path / "y.jsonl", {"prompt": "p", "id": "q2"}, {"prompt": "p", "id": "q0"})
    with pytest.raises(
        DataError,
        match=r"y.jsonl, row 1: data.metadata_file=.*code.jsonl has no row with the id 'q2'",
    ):
        load(other, tokenizer, f"data.metadata_file={metadata}")
    broken = make_config(f"data.train_files=[{other}]", f"data.metadata_file={metadata}")
    assert (
        "y.jsonl, row 2: input_output is '{', which is not JSON"
        in rejected_rows(other, broken, tokenizer)[1].reason
    )


def test_verl_rows_of_code_have_their_tests_in_the_ground_truth(
    tokenizer: Any, tmp_path: Path
) -> None:
    row = {
        "data_source": "codecontests",
        "prompt": "p",
        "ability": "code",
        "reward_model": {
            "style": "rule",
            "ground_truth": json.dumps({"inputs": ["1"], "outputs": ["2"]}),
        },
        "extra_info": {"split": "train", "index": 7},
    }
    [prompt] = load(write(tmp_path / "x.jsonl", row), tokenizer)
    assert (prompt.data_source, prompt.problem.tests) == (
        "codecontests",
        [StdinTest(input="1", output="2")],
    )


def test_gsm8k_rows_of_either_layout_want_their_number(tokenizer: Any, tmp_path: Path) -> None:
    plain = {"question": "How many?", "answer": "2+2 = 4\n#### 4"}
    verl = {
        "prompt": "How many?",
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    first, second = load(write(tmp_path / "x.jsonl", plain, verl), tokenizer)
    assert first.problem.tests == [AnswerTest(rule="gsm8k", expected="2+2 = 4\n#### 4")]
    assert second.problem.tests == [AnswerTest(rule="gsm8k", expected="4")]
    assert (first.text, first.data_source, second.data_source) == (
        "How many?\n",
        "gsm8k",
        "openai/gsm8k",
    )


@pytest.mark.covers("verl's schema, data_source")
def test_math_rows_want_their_expression_and_an_unknown_source_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    row = {
        "prompt": "?",
        "data_source": "lighteval/MATH",
        "reward_model": {"style": "rule", "ground_truth": "x"},
    }
    [prompt] = load(write(tmp_path / "x.jsonl", row), tokenizer)
    assert prompt.problem.tests == [AnswerTest(rule="math", expected="x")]
    with pytest.raises(
        DataError,
        match=(
            r"y.jsonl, row 1: data_source=mine is unknown, so it cannot be scored; use one of"
            r" .*openai/gsm8k"
        ),
    ):
        load(write(tmp_path / "y.jsonl", {**row, "data_source": "mine"}), tokenizer)


def test_own_tests_may_name_an_answer_and_its_rule(tokenizer: Any, tmp_path: Path) -> None:
    [prompt] = load(
        write(
            tmp_path / "x.jsonl",
            {"prompt": "?", "tests": [{"kind": "answer", "rule": "exact", "expected": "a"}]},
        ),
        tokenizer,
    )
    assert prompt.problem.tests == [AnswerTest(rule="exact", expected="a")]
