"""Sources and selection of rows: patterns, URLs, ids, metadata, lengths."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from data_support import TESTS, load, make_config, texts, write_jsonl

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.types import StdinTest
from async_rl.data.drafts import MAX_ID_LENGTH, filled, fitted
from async_rl.data.files import matching_files, read_rows
from async_rl.data.prompts import examined


def rejected_rows(path: Path, config: RunConfig, tokenizer: Any) -> list[str]:
    """The reasons of the rows that become no prompt, without the folder of the file."""
    outcomes = examined([str(path)], config, tokenizer)
    reasons = [str(outcome) for _, outcome in outcomes if isinstance(outcome, DataError)]
    return [reason.rpartition(f"{path.parent}/")[2] for reason in reasons]


def long(num_words: int) -> dict[str, Any]:
    return {"prompt": "x " * num_words, "tests": TESTS}


@pytest.mark.covers("train_files, val_files: one or several")
def test_a_pattern_names_its_files_in_order_and_none_twice(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", {"prompt": name, "tests": TESTS})
    assert texts(load(tmp_path / "*.jsonl", tokenizer)) == ["a", "b", "c"]
    twice = matching_files([str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl")])
    assert [Path(file).stem for file in twice] == ["b", "a", "c"]


def test_files_of_one_name_in_two_folders_do_not_share_ids(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_jsonl(tmp_path / name / "train.jsonl", {"prompt": name, "tests": TESTS})
    prompts = load(tmp_path / "*" / "*.jsonl", tokenizer)
    assert [prompt.prompt_id for prompt in prompts] == ["x/train/1", "y/train/1"]


@pytest.mark.covers("train_files, val_files: URLs in a cache")
def test_a_remote_file_is_copied_once_and_again_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    url = "memory://bucket/part-0.jsonl"
    copied: list[str] = []
    get_file = type(memory).get_file

    def counting(self: Any, path: str, target: str, **options: Any) -> None:
        copied.append(path)
        get_file(self, path, target, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(type(memory), "get_file", counting)
    for value in (1, 2):
        memory.pipe_file("/bucket/part-0.jsonl", json.dumps({"a": value}).encode())
        for _ in range(2):
            assert list(read_rows(url)) == [(f"{url}, row 1", {"a": value})]
        assert len(copied) == value
    found = matching_files(["memory://bucket/part-*.jsonl"])
    assert found == [url.replace("memory://", "memory:///")]
    memory.rm("/bucket", recursive=True)
    with pytest.raises(DataError, match=r"memory://bucket/part-0.jsonl: there is no such file"):
        list(read_rows(url))


@pytest.mark.covers("max_prompt_length, truncation")
def test_each_truncation_keeps_its_own_tokens() -> None:
    kept = {"error": None, "drop": None, "left": [3, 4, 5], "right": [1, 2, 3], "middle": [1, 4, 5]}
    assert {mode: fitted([1, 2, 3, 4, 5], 3, mode) for mode in kept} == kept  # type: ignore[arg-type]
    assert fitted([1, 2, 3], 3, "error") == [1, 2, 3]


def test_cut_prompts_have_the_text_of_their_tokens_and_are_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "first " + "x " * 600 + "last"
    path = write_jsonl(tmp_path / "x.jsonl", {"prompt": text, "tests": TESTS})
    [prompt] = load(path, tokenizer, "data.truncation=middle")
    assert prompt.text.startswith("first")
    assert prompt.text.endswith("last\n")
    assert len(prompt.token_ids) == 500
    assert prompt.text == tokenizer.decode(prompt.token_ids.tolist())
    assert "cut 1 of 1 prompts to data.max_prompt_tokens=500" in caplog.text


@pytest.mark.covers("fill_to_max_length")
def test_filled_prompts_have_one_length_and_their_old_end(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "tests": TESTS} for prompt in ("a b", "c")]
    path = write_jsonl(tmp_path / "x.jsonl", *rows)
    plain, full = load(path, tokenizer), load(path, tokenizer, "data.longest=prompts")
    assert [len(prompt.token_ids) for prompt in full] == [500, 500]
    for short, filled_up in zip(plain, full, strict=True):
        assert filled_up.token_ids[-len(short.token_ids) :].tolist() == short.token_ids.tolist()
    assert filled([1, 2, 3], 5) == [2, 3, 1, 2, 3]


@pytest.mark.covers("bad rows")
@pytest.mark.covers("truncation: error and drop")
def test_bad_rows_and_over_long_prompts_are_refused_with_their_number_or_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"prompt": "good", "tests": TESTS}
    path = write_jsonl(tmp_path / "x.jsonl", good, {"prompt": "bad"}, long(600), {}, "{broken")
    over_long = r"x.jsonl, row 3: 60\d tokens are over data.max_prompt_tokens=500.*truncation=drop"
    for settings, refused in (
        ([], r"row 2: no tests among .* \(async-rl data check lists every such row\)"),
        (["data.truncation=drop"], "row 2: no tests among"),
        (["data.bad_rows=drop"], over_long),
    ):
        with pytest.raises(DataError, match=refused):
            load(path, tokenizer, *settings)
    dropping = ("data.bad_rows=drop", "data.truncation=drop")
    assert texts(load(path, tokenizer, *dropping)) == ["good"]
    assert f"dropped 4 of 5 rows, the first: {path}, row 2: no tests" in caplog.text
    config = make_config(f"data.train_files=[{path}]", "data.max_prompt_tokens=500")
    reasons = [reason[9:18] for reason in rejected_rows(path, config, tokenizer)]
    assert reasons == ["row 2: no", "row 3: 60", "row 4: no", "row 5: no"]
    with pytest.raises(DataError, match=r"none of 1 rows .* over data\.max_prompt_tokens=500"):
        load(write_jsonl(tmp_path / "y.jsonl", long(600)), tokenizer, *dropping)


@pytest.mark.covers("prompt_id_key, max_prompt_id_length")
def test_over_long_ids_and_two_rows_with_one_id_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": "p", "id": "n" * MAX_ID_LENGTH, "tests": TESTS}
    path = write_jsonl(tmp_path / "x.jsonl", row)
    assert [p.prompt_id for p in load(path, tokenizer)] == ["x/" + row["id"]]
    with pytest.raises(DataError, match=r"row 2: id x/nnn.* is also the id of .*row 1"):
        load(write_jsonl(path, row, row), tokenizer)
    with pytest.raises(DataError, match=r"row 1: the id 'nnn.* has 257 characters, over 256"):
        load(write_jsonl(path, {**row, "id": row["id"] + "n"}), tokenizer)


@pytest.mark.covers("AReaL's code data, REAL_CODE_METADATA_PATH")
def test_areal_rows_find_their_tests_in_the_metadata_file(tokenizer: Any, tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    known = {"query_id": "q1", "input_output": tests, "solutions": []}
    metadata = write_jsonl(tmp_path / "code.jsonl", known, {"id": "q0", "input_output": "{"})
    joined = f"data.metadata_file={metadata}"
    row = {"question": "Do it", "query_id": "q1", "scores": [1.0]}
    [prompt] = load(write_jsonl(tmp_path / "x.jsonl", row), tokenizer, joined)
    assert (prompt.text, prompt.prompt_id) == ("Do it\n", "x/q1")
    assert prompt.problem.tests == [StdinTest(input="1\n", output="2\n")]
    unknown = [{"prompt": "p", "id": name} for name in ("q2", "q0")]
    other = write_jsonl(tmp_path / "y.jsonl", *unknown)
    config = make_config(f"data.train_files=[{other}]", joined)
    absent, broken = rejected_rows(other, config, tokenizer)
    assert absent.endswith("code.jsonl has no row with the id 'q2'; add it")
    assert broken.startswith("y.jsonl, row 2: input_output is '{', which is not JSON")
