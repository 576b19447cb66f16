from __future__ import annotations

import pytest

from async_rl.core.errors import DataError
from async_rl.core.programs import LANGUAGES, language_of, names_of
from async_rl.data.problems import read_problem

PAIRS = {"inputs": ["1"], "outputs": ["1"]}


def test_each_name_means_one_language() -> None:
    assert language_of(" C++ ") == "cpp"
    assert language_of("PYTHON") == "python"
    assert language_of("nodejs") == "javascript"
    assert language_of("cobol") is None
    names = [name for language in LANGUAGES for name in names_of(language)]
    assert len(names) == len(set(names))


def test_row_names_its_language() -> None:
    problem, _ = read_problem({"input_output": PAIRS, "language": "C++"})
    assert problem.language == "cpp"
    assert read_problem({"input_output": PAIRS})[0].language == "python"
    # A natural language, beside tests that are not about a program's output.
    row = {"test_list": ["assert f(1) == 1"], "language": "en"}
    assert read_problem(row)[0].language == "python"


def test_unknown_language_and_tests_of_python_in_another_language_are_errors() -> None:
    with pytest.raises(DataError, match="language=cobol is unknown; use one of python, cpp"):
        read_problem({"input_output": PAIRS, "language": "cobol"})
    mixed = [{"kind": "stdin", "input": "", "output": ""}, {"kind": "assert", "code": "assert 1"}]
    with pytest.raises(DataError, match="programs in rust are judged by tests of standard input"):
        read_problem({"tests": mixed, "language": "rust"})
