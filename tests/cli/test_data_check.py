"""Facts about `async-rl data check`."""

import json
from pathlib import Path
from typing import Any

import pytest
from empty_model import write_model
from tables import table
from typer.testing import CliRunner, Result

from async_rl.core.errors import ConfigError
from async_rl.launchers.cli import application
from benchmarks.embedded import corpus
from benchmarks.embedded.vocabulary import build_tokenizer

TESTS = [{"kind": "stdin", "input": "1", "output": "2"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("model"))
    build_tokenizer(corpus.vocabulary_text(), 512).save_pretrained(directory)
    return directory


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def check(file: str, model: Path, *settings: str) -> Result:
    words = ["data", "check", file, f"model.path={model}", *settings]
    return CliRunner().invoke(application(), words)


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
    result = check(file, model, "data.max_prompt_tokens=60")
    assert result.exit_code == 1
    assert "4 rows, 2 prompts" in result.output
    assert "(limit 60)" in result.output
    assert "data_source code: 1 rows, reward by stdin tests" in result.output
    assert "data_source mbpp: 1 rows, reward by assert tests" in result.output
    assert "1 rows are refused (data.truncation=error):" in result.output
    assert "x.jsonl, row 3: " in result.output
    assert "1 rows are refused (data.bad_rows=error):" in result.output
    assert "x.jsonl, row 4: no tests among the columns ['prompt']" in result.output

    words = ("data.max_prompt_tokens=60", "data.truncation=left", "data.bad_rows=drop")
    lenient = check(file, model, *words)
    assert lenient.exit_code == 0
    assert "1 rows are left out (data.bad_rows=drop):" in lenient.output
    without = CliRunner().invoke(application(), ["data", "check", file])
    assert isinstance(without.exception, ConfigError)
    assert "set model.path" in str(without.exception)


def test_rows_whose_tests_judge_nothing_are_listed(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", *table(__file__, "useless"))
    result = check(file, model, "data.bad_rows=drop", "data.id_key=id")
    assert result.exit_code == 1
    nothing = "a program that prints nothing and returns None passes every test"
    assert f"  x/silent: {nothing}\n" in result.output
    assert f"  x/none: {nothing}\n" in result.output
    assert "  x/broken: ImportError" in result.output
    assert "row 6: a test is broken: it does not use the program" in result.output
    assert "3 rows have useless tests:" in result.output


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
        result = check(file, model, f"reward.terms.a={tmp_path}/r.py:{name}")
        assert result.exit_code == bool(reason), result.output
        assert reason in result.output
    missing = check(file, model, f"reward.terms.a={tmp_path}/r.py:yours")
    assert "has no function yours" in str(missing.exception)


def test_failing_references_of_each_layout_are_listed_with_the_reason(
    model: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "x.jsonl", *table(__file__, "references"))
    result = check(file, model, "sandbox.timeout_s=0.2")
    assert result.exit_code == 1
    _, found, listed = result.output.partition("4 reference solutions fail the tests of their rows")
    assert found, result.output
    verdicts = {"areal/4, 2 of 2": "wrong_answer", "contest/5": "wrong_answer"}
    verdicts |= {"old/1": "compile_error", "slow/2": "timeout"}
    assert dict(line.strip().split(": ")[:2] for line in listed.splitlines()[1:5]) == verdicts
    file = write(tmp_path / "x.jsonl", *table(__file__, "unreadable"))
    result = check(file, model)
    assert result.exit_code == 1
    assert "column solutions is 'print(2)', which is not JSON" in " ".join(result.output.split())
