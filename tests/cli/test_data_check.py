"""Facts about `async-rl data check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tables import table
from typer.testing import CliRunner

from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from benchmarks.embedded import corpus
from benchmarks.embedded.vocabulary import build_tokenizer

TESTS = [{"kind": "stdin", "input": "1", "output": "2"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer(corpus.vocabulary_text(), 512).save_pretrained(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("")
    return directory


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_a_run_would_use_and_leave_out_is_said_with_reasons(
    model: Path, tmp_path: Path
) -> None:
    file = write(
        tmp_path / "x.jsonl",
        {"prompt": "a b", "tests": TESTS},
        {"prompt": "a", "test_list": ["assert f()"], "data_source": "mbpp"},
        {"prompt": "a " * 90, "tests": TESTS},
        {"prompt": "a"},
    )
    settings = [f"model.path={model}", "data.max_prompt_tokens=60"]
    result = CliRunner().invoke(application(), ["data", "check", file, *settings])
    assert result.exit_code == 1
    assert "4 rows, 2 prompts" in result.output
    assert "(limit 60)" in result.output
    assert "data_source code: 1 rows, reward by stdin tests" in result.output
    assert "data_source mbpp: 1 rows, reward by assert tests" in result.output
    assert "1 rows are refused (data.truncation=error):" in result.output
    assert "x.jsonl, row 3: " in result.output
    assert "1 rows are refused (data.bad_rows=error):" in result.output
    assert "x.jsonl, row 4: no tests among the columns ['prompt']" in result.output

    lenient = CliRunner().invoke(
        application(),
        ["data", "check", file, *settings, "data.truncation=left", "data.bad_rows=drop"],
    )
    assert lenient.exit_code == 0
    assert "1 rows are left out (data.bad_rows=drop):" in lenient.output


def test_rows_whose_tests_judge_nothing_are_listed(model: Path, tmp_path: Path) -> None:
    broken = "r = f(3)\nfrom math import no_such_name\nassert r == 9"
    late = "x = f(3)\nassert y == 9"
    file = write(
        tmp_path / "x.jsonl",
        {"prompt": "a", "id": "good", "test_list": ["assert f(3) == 9"]},
        {"prompt": "b", "id": "silent", "tests": [{"kind": "stdin", "input": "1", "output": ""}]},
        {"prompt": "c", "id": "none", "test_list": ["assert f(3) is None", "assert not f(4)"]},
        {"prompt": "d", "id": "broken", "test_list": [broken]},
        {"prompt": "e", "id": "words", "answer": "#### 7"},
        {"prompt": "f", "id": "asks nothing", "test_list": ["assert 1 == 1"]},
        {"prompt": "g", "id": "fine", "test_list": [late]},
    )
    settings = [f"model.path={model}", "data.bad_rows=drop", "data.id_key=id"]
    result = CliRunner().invoke(application(), ["data", "check", file, *settings])
    assert result.exit_code == 1
    nothing = "a program that prints nothing and returns None passes every test"
    assert f"  x/silent: {nothing}\n" in result.output
    assert f"  x/none: {nothing}\n" in result.output
    assert "  x/broken: ImportError" in result.output
    assert "row 6: a test is broken: it does not use the program" in result.output
    assert "3 rows have useless tests:" in result.output


def test_the_functions_that_score_each_row_are_told_with_their_weights(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text("def mine(sample):\n    return 1\n")
    mine = f"{tmp_path}/r.py:mine"
    rows = [
        {"prompt": "a", "tests": TESTS},
        {"prompt": "b", "data_source": "talk"},
        {"prompt": "c", "tests": TESTS, "data_source": "mbpp"},
    ]
    file = write(tmp_path / "x.jsonl", *rows)

    def told(*settings: str) -> list[str]:
        result = CliRunner().invoke(
            application(), ["data", "check", file, f"model.path={model}", *settings]
        )
        assert result.exit_code == 0, result.output
        return sorted(
            line.removeprefix("data_source ")
            for line in result.output.splitlines()
            if line.startswith("data_source")
        )

    every = [
        "code: 1 rows, reward by mine",
        "mbpp: 1 rows, reward by mine",
        "talk: 1 rows, reward by mine",
    ]
    assert told(f"reward.terms.mine={mine}") == every
    by_source = told(
        f"reward.terms.mine={mine}",
        "reward.terms.mine.sources=[talk]",
        "reward.terms.tests=tests",
        "reward.terms.length=length",
        "reward.terms.length.weight=-0.5",
    )
    assert by_source == [
        "code: 1 rows, reward by stdin tests + -0.5 x length",
        "mbpp: 1 rows, reward by stdin tests + -0.5 x length",
        "talk: 1 rows, reward by mine",
    ]
    refused = CliRunner().invoke(
        application(),
        ["data", "check", file, f"model.path={model}", f"reward.terms.mine={tmp_path}/r.py:yours"],
    )
    assert "has no function yours" in str(refused.exception)


def test_lengths_are_those_of_the_models_own_tokens(model: Path, tmp_path: Path) -> None:
    file = write(
        tmp_path / "it's, [one].jsonl", *({"prompt": "[" * n, "tests": TESTS} for n in (1, 2, 3))
    )
    tokenizer = build_tokenizer(corpus.vocabulary_text(), 512)
    lengths = [len(tokenizer("[" * n + "\n")["input_ids"]) for n in (1, 2, 3)]
    result = CliRunner().invoke(
        application(), ["data", "check", file.replace("[", "[[]"), f"model.path={model}"]
    )
    assert (
        f"shortest {min(lengths)}, median {sorted(lengths)[1]}, 95% {max(lengths)}, longest"
        f" {max(lengths)} " in result.output
    )


def test_without_a_model_it_is_said_what_to_give(tmp_path: Path) -> None:
    result = CliRunner().invoke(application(), ["data", "check", write(tmp_path / "x.jsonl")])
    assert isinstance(result.exception, ConfigError)
    assert "set model.path" in str(result.exception)


def test_a_reward_function_that_gives_no_score_is_named_with_its_first_row(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(
        "def raises(sample): return sample.row['anser']\n"
        "def nan(sample): return float('nan')\n"
        "async def text(sample): return 'good'\n"
        "def scores(sample): return len(sample.token_ids) / sample.max_tokens\n"
    )
    file = write(tmp_path / "x.jsonl", {"prompt": "a"}, {"prompt": "b"})
    for name, reason in (
        ("raises", "x/1: a raised KeyError: 'anser'"),
        ("nan", "x/1: a returned nan; return a finite number"),
        ("text", "x/1: a returned 'good'; return a finite number"),
        ("scores", ""),
    ):
        words = [f"model.path={model}", f"reward.terms.a={tmp_path}/r.py:{name}"]
        result = CliRunner().invoke(application(), ["data", "check", file, *words])
        assert result.exit_code == bool(reason), result.output
        assert reason in result.output


def test_wrong_reference_solutions_of_each_layout_are_listed(model: Path, tmp_path: Path) -> None:
    pairs = json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]})
    solutions = {"language": [2, 3], "solution": ["int main() {}", "print(int(input()) + 1)"]}
    tests = {"input": ["1\n", "3\n"], "output": ["2\n", "6\n"]}
    none: dict[str, list[str]] = {"input": [], "output": []}
    kinds = {"public_tests": tests, "private_tests": none, "generated_tests": none}
    file = write(
        tmp_path / "x.jsonl",
        {"question": "a", "id": 1, "input_output": pairs, "solutions": '["print(2*int(input()))"]'},
        {"description": "b", "id": 2, **kinds, "solutions": solutions},
        {"prompt": "c", "id": 3, "test_list": ["assert f(3) == 9"], "code": "def f(x): return x*x"},
        {"prompt": "d", "id": 4, "input_output": pairs},
        {"question": "e", "id": 5, "answer": "#### 7", "solution": "words"},
    )
    result = CliRunner().invoke(application(), ["data", "check", file, f"model.path={model}"])
    assert result.exit_code == 1
    _, found, listed = result.output.partition("1 reference solutions fail the tests of their rows")
    assert found
    assert listed.strip(":\n ").startswith("2: wrong_answer: printed '4")


def test_a_reference_column_that_cannot_be_read_is_listed(model: Path, tmp_path: Path) -> None:
    row = {"question": "a", "input_output": {"inputs": ["1"], "outputs": ["2"]}}
    file = write(tmp_path / "x.jsonl", row | {"solutions": "print(2)"})
    result = CliRunner().invoke(application(), ["data", "check", file, f"model.path={model}"])
    assert result.exit_code == 1
    assert "column solutions is 'print(2)', which is not JSON" in " ".join(result.output.split())


def test_failing_references_are_listed_with_the_reason(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", *table(__file__, "references"))
    result = CliRunner().invoke(
        application(), ["data", "check", file, f"model.path={model}", "sandbox.timeout_s=0.2"]
    )
    assert result.exit_code == 1
    _, found, listed = result.output.partition("3 reference solutions fail the tests of their rows")
    assert found, result.output
    assert sorted(line.strip().split(": ")[:2] for line in listed.splitlines()[1:4]) == [
        ["areal/4, 2 of 2", "wrong_answer"],
        ["old/1", "compile_error"],
        ["slow/2", "timeout"],
    ]
