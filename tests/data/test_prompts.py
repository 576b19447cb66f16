"""Prompts of the embedded task and of data files, in every layout that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data_support import make_config

from async_rl.core.errors import DataError
from async_rl.core.types import AssertTest, CallTest, Prompt, StdinTest
from async_rl.data import corpus
from async_rl.data.problems import read_problem
from async_rl.data.prompts import held_out_prompts, train_prompts
from async_rl.data.tokenizer import build_tokenizer

OWN_TESTS = [
    {"kind": "stdin", "input": "1\n", "output": "2\n"},
    {"kind": "call", "function": "f", "args": [1, "a"], "expected": None},
    {"kind": "assert", "code": "assert f(1) == 2"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(corpus.vocabulary_text(), 512)


@pytest.fixture
def chat_tokenizer() -> Any:
    chat = build_tokenizer(corpus.vocabulary_text(), 512)
    chat.chat_template = TEMPLATE
    return chat


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any, *overrides: str) -> list[Prompt]:
    config = make_config(f"data.train_files=[{path}]", "data.max_prompt_tokens=500", *overrides)
    return list(train_prompts(config, tokenizer))


def test_the_embedded_prompts_keep_both_wordings_on_one_side(tokenizer: Any) -> None:
    config = make_config("evaluation.num_prompts=0")
    train, held_out = list(train_prompts(config, tokenizer)), held_out_prompts(config, tokenizer)
    assert (len(train), len(held_out)) == (13_680, 1_520)
    specs = [{prompt.prompt_id.rpartition("/")[0] for prompt in side} for side in (train, held_out)]
    assert not specs[0] & specs[1]
    assert len({prompt.prompt_id for prompt in [*train, *held_out]}) == 15_200
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}


def test_the_first_held_out_prompts_are_of_different_specs_and_both_wordings(
    tokenizer: Any,
) -> None:
    first = held_out_prompts(make_config("evaluation.num_prompts=100"), tokenizer)
    assert len({prompt.prompt_id.rpartition("/")[0] for prompt in first}) == 100
    assert {prompt.prompt_id[-1] for prompt in first} == {"0", "1"}


def test_embedded_prompts_fit_the_default_limits(tokenizer: Any) -> None:
    config = make_config()
    prompts = list(train_prompts(config, tokenizer))
    assert max(len(prompt.token_ids) for prompt in prompts) <= config.data.max_prompt_tokens
    assert tokenizer.decode(prompts[0].token_ids.tolist()) == prompts[0].text
    assert len(prompts[0].problem.tests) == 8


def test_an_embedded_prompt_over_the_limit_is_refused_at_the_start(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"tokens are over data.max_prompt_tokens=9"):
        list(train_prompts(make_config("data.max_prompt_tokens=9"), tokenizer))


def test_own_tests_of_all_kinds_are_read_from_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "Do it",
            "tests": OWN_TESTS,
            "setup": "import math",
            "data_source": "mine",
            "id": 7,
        }
    ]
    [prompt] = load(write_jsonl(tmp_path / "mine.jsonl", rows), tokenizer)
    assert prompt.problem.tests == [
        StdinTest(input="1\n", output="2\n"),
        CallTest(function="f", args=[1, "a"], expected=None),
        AssertTest(code="assert f(1) == 2"),
    ]
    assert (prompt.problem.setup, prompt.data_source, prompt.prompt_id, prompt.text) == (
        "import math",
        "mine",
        "mine/7",
        "Do it\n",
    )
    assert tokenizer.decode(prompt.token_ids.tolist()) == "Do it\n"


def test_mbpp_rows_show_their_asserts_and_keep_their_imports_as_setup(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mbpp.json"
    row = {
        "prompt": "Add one.",
        "test_list": ["assert add(1) == 2", "assert add(2) == 3"],
        "test_imports": ["import math"],
        "task_id": 3,
    }
    path.write_text(json.dumps([row]))
    [prompt] = load(path, tokenizer)
    assert (
        prompt.text
        == "Add one.\nYour code should pass these tests:\nassert add(1) == 2\nassert add(2) == 3\n"
    )
    assert prompt.problem.tests == [
        AssertTest(code="assert add(1) == 2"),
        AssertTest(code="assert add(2) == 3"),
    ]
    assert prompt.problem.setup == "import math"


@pytest.mark.covers("input_output without fn_name")
def test_input_output_without_a_function_is_standard_input(tokenizer: Any, tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "query_id": "q1",
        "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    }
    [prompt] = load(write_jsonl(tmp_path / "areal.jsonl", [row]), tokenizer)
    assert prompt.problem.tests == [StdinTest(input="1 2\n", output="3\n")]
    assert prompt.prompt_id == "areal/q1"


@pytest.mark.covers("input_output with fn_name")
def test_input_output_with_a_function_has_one_json_argument_per_line(
    tokenizer: Any, tmp_path: Path
) -> None:
    row = {
        "prompt": "p",
        "input_output": {"inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"], "fn_name": "solve"},
    }
    [prompt] = load(write_jsonl(tmp_path / "areal.jsonl", [row]), tokenizer)
    expected = CallTest(function="solve", args=[[1, 2], "a"], expected=[3], types="json")
    assert prompt.problem.tests == [expected]


HELPED = (
    "import math\ndef poly(xs: list, x: float):\n    return sum(c * x**i for i, c in"
    ' enumerate(xs))\ndef find_zero(xs: list):\n    """ A root of poly. """\n'
)


def test_helpers_in_a_prompt_of_human_eval_belong_to_the_test() -> None:
    test = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4"
    row = {"prompt": HELPED, "test": test, "entry_point": "find_zero"}
    problem, _ = read_problem("row 1", row)
    assert "def poly" in problem.setup
    assert "import math" in problem.setup
    assert "find_zero" not in problem.setup
    for prompt in (HELPED.replace("poly(xs", "find_zero(xs"), "Write find_zero.", None):
        assert read_problem("row 1", {**row, "prompt": prompt})[0].setup == ""


def test_check_function_of_human_eval_is_an_assert_test_on_its_entry_point(
    tokenizer: Any, tmp_path: Path
) -> None:
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    row = {"prompt": "def f(x):\n", "test": test, "entry_point": "f", "task_id": "HumanEval/0"}
    [prompt] = load(write_jsonl(tmp_path / "he.jsonl", [row]), tokenizer)
    assert prompt.problem.tests == [AssertTest(code=f"{test}\ncheck(f)")]


@pytest.mark.covers("train_files, val_files: jsonl and parquet")
def test_parquet_rows_give_the_same_prompts_as_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"Task {i}", "tests": json.dumps(OWN_TESTS)} for i in range(5)]
    (tmp_path / "a").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "a" / "x.parquet", row_group_size=2
    )
    from_parquet = load(tmp_path / "a" / "x.parquet", tokenizer)
    from_jsonl = load(write_jsonl(tmp_path / "x.jsonl", rows), tokenizer)
    assert [(p.prompt_id, p.text, p.problem) for p in from_parquet] == [
        (p.prompt_id, p.text, p.problem) for p in from_jsonl
    ]


def test_parquet_structs_with_absent_fields_are_read(tokenizer: Any, tmp_path: Path) -> None:
    tests = [
        {"kind": "stdin", "input": "1", "output": "2"},
        {"kind": "assert", "code": "assert f()"},
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "p", "tests": tests}]), tmp_path / "x.parquet"
    )
    [prompt] = load(tmp_path / "x.parquet", tokenizer)
    assert prompt.problem.tests == [
        StdinTest(input="1", output="2"),
        AssertTest(code="assert f()"),
    ]


@pytest.mark.covers("prompt_key: chats and strings")
def test_the_chat_template_wraps_strings_and_chats_and_opens_the_answer(
    chat_tokenizer: Any, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Hi", "tests": OWN_TESTS},
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "test_list": ["assert g()"],
        },
    ]
    first, second = load(write_jsonl(tmp_path / "x.jsonl", rows), chat_tokenizer)
    assert first.text == "<user>Hi<answer>"
    assert (
        second.text
        == "<system>Be brief.<user>Hi\nYour code should pass these tests:\nassert g()<answer>"
    )
    assert chat_tokenizer.decode(first.token_ids.tolist()) == first.text


@pytest.mark.covers("prompt_key")
def test_prompt_key_chooses_the_column(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": "no", "question": "yes", "tests": OWN_TESTS}]
    )
    assert load(path, tokenizer, "data.prompt_key=question")[0].text == "yes\n"


@pytest.mark.covers("truncation: error and drop")
def test_over_long_prompts_are_an_error_or_dropped_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": "x " * n, "tests": OWN_TESTS} for n in (3, 900)]
    )
    with pytest.raises(
        DataError,
        match=r"x.jsonl, row 2: 90\d tokens are over data.max_prompt_tokens=500.*truncation=drop",
    ):
        load(path, tokenizer)
    assert len(load(path, tokenizer, "data.truncation=drop")) == 1
    assert "dropped 1 of 2 prompts" in caplog.text


def test_val_files_are_the_held_out_prompts_and_without_them_there_are_none(
    tokenizer: Any, tmp_path: Path
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "tests": OWN_TESTS}])
    val = write_jsonl(tmp_path / "val.jsonl", [{"prompt": "b", "tests": OWN_TESTS}])
    config = make_config(f"data.train_files=[{train}]", f"data.val_files=[{val}]")
    assert [prompt.text for prompt in held_out_prompts(config, tokenizer)] == ["b\n"]
    assert held_out_prompts(make_config(f"data.train_files=[{train}]"), tokenizer) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": OWN_TESTS}, r"row 1: no column 'prompt', only \['tests'\]; set data.prompt_key"),
        ({"prompt": 3, "tests": OWN_TESTS}, "row 1: column 'prompt' must be a string or a list"),
        ({"prompt": [], "tests": OWN_TESTS}, "row 1: column 'prompt' must be a string or a list"),
        (
            {"prompt": [{"role": "user", "content": "x"}], "tests": OWN_TESTS},
            "row 1: .*no chat template",
        ),
        ({"prompt": "p"}, "row 1: no tests among the columns"),
        ({"prompt": "p", "tests": []}, "row 1: the list of tests is empty"),
        (
            {"prompt": "p", "tests": [{"kind": "stdin", "input": 1, "output": ""}]},
            "row 1: column tests is not as documented",
        ),
        ({"prompt": "p", "tests": "[oops"}, "row 1: tests is .*not JSON"),
        (
            {
                "prompt": "p",
                "tests": [{"kind": "call", "function": "f", "args": [2**64], "expected": 1}],
            },
            "row 1: .*more than 64 bits",
        ),
        ({"prompt": "p", "test": "def check(c): pass"}, "row 1: entry_point must be a string"),
        ({"prompt": "p", "test_list": "assert x"}, "row 1: test_list must be a list of strings"),
        (
            {"prompt": "p", "input_output": {"inputs": ["1"], "outputs": []}},
            "row 1: input_output has 1 inputs and 0 outputs",
        ),
        (
            {"prompt": "p", "input_output": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}},
            "row 1: .*inputs is 'x', which is not JSON",
        ),
        (
            {"prompt": "p", "input_output": {"outputs": []}},
            "row 1: input_output.inputs must be a list of strings",
        ),
    ],
)
def test_an_unusable_row_is_named_with_its_file_and_the_remedy(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=r"x.jsonl, " + message):
        load(write_jsonl(tmp_path / "x.jsonl", [row]), tokenizer)


def test_two_rows_with_one_id_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "id": 1, "tests": OWN_TESTS}] * 2
    with pytest.raises(DataError, match=r"row 2: id x/1 is also the id of .*row 1"):
        load(write_jsonl(tmp_path / "x.jsonl", rows), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "no such file"),
        ("x.csv", b"a,b", "unknown kind of file '.csv'"),
        ("x.jsonl", b'{"a": 1}\nnot json\n', "x.jsonl, row 1: no tests among"),
        ("y.jsonl", b"not json\n", "y.jsonl, row 1: not valid JSON"),
        ("z.jsonl", b"[1]\n", "z.jsonl, row 1: a row must be an object"),
        ("x.json", b'{"a": 1}', "holds one dict, not an array"),
        ("x.parquet", b"not parquet", "x.parquet: cannot be read"),
        ("empty.jsonl", b"", "no rows"),
    ],
)
def test_an_unusable_file_is_named(
    tokenizer: Any, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name, tokenizer)
