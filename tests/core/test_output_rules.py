"""The columns of a row that name the language of its program and how printed text is compared."""

import json
from typing import Any

import pytest
from tables import table

from async_rl.core.errors import DataError
from async_rl.core.programs import LANGUAGES, OutputRules, language_of, names_of
from async_rl.core.types import StdinTest
from async_rl.data.problems import read_problem

PAIRS = {"inputs": ["1", "2"], "outputs": ["A", "B"]}


@pytest.mark.parametrize("as_given", [dict, json.dumps])
def test_the_column_compare_is_about_every_test_of_a_row_that_prints(as_given: Any) -> None:
    compare = as_given({"layout": "tokens", "ignores_case": True, "relative_tolerance": None})
    problem, _ = read_problem({"input_output": PAIRS, "compare": compare})
    rules = OutputRules(layout="tokens", ignores_case=True)
    assert problem.tests == [
        StdinTest(input="1", output="A", rules=rules),
        StdinTest(input="2", output="B", rules=rules),
    ]


def test_rules_that_cannot_be_read_are_refused() -> None:
    for compare, reason in table(__file__, "rules_that_cannot_be_read"):
        with pytest.raises(DataError, match=f"compare.*{reason}"):
            read_problem({"input_output": PAIRS, "compare": compare})


def test_a_row_names_its_language_and_each_name_means_one() -> None:
    names = [name for language in LANGUAGES for name in names_of(language)]
    assert len(names) == len(set(names))
    assert [language_of(name) for name in (" C++ ", "PYTHON", "cobol")] == ["cpp", "python", None]
    problem, _ = read_problem({"input_output": PAIRS, "language": "C++"})
    assert problem.language == "cpp"
    assert read_problem({"input_output": PAIRS})[0].language == "python"
    # A natural language, beside tests that are not about a program's output.
    row = {"test_list": ["assert f(1) == 1"], "language": "en"}
    assert read_problem(row)[0].language == "python"
    with pytest.raises(DataError, match="language=cobol is unknown; use one of python, cpp"):
        read_problem({"input_output": PAIRS, "language": "cobol"})
    mixed = [{"kind": "stdin", "input": "", "output": ""}, {"kind": "assert", "code": "assert 1"}]
    with pytest.raises(DataError, match="programs in rust are judged by tests of standard input"):
        read_problem({"tests": mixed, "language": "rust"})
