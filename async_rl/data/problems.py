"""From the columns of a row to the tests of a programming problem, in six layouts.

- `tests` (with optional `setup`): our own, a list of {kind: stdin | call | assert | answer |
  container, ...}, or the same as a JSON string.
- `test_list` (with optional `test_imports`): assert statements, as in MBPP.  They name the
  function, so the prompt has to show them. A name of Python or of the imports is the program's if
  the reference solution (`code` or `canonical_solution`) defines it.
- `test` and `entry_point`: a function check(candidate) and the name of its argument, as in
  HumanEval. Helpers that the prompt defines belong to the test: a program that answered for them
  could let any answer pass.
- `reward_model` {style, ground_truth}, as in verl: by `data_source` an answer in words, or for code
  the content of `input_output`.
- `answer` with `#### number` at its end, as in GSM8K.
- `input_output`: a JSON string or an object {inputs, outputs, fn_name?}, as in AReaL; with
  `fn_name` each line of an input is one argument.
A column `language` names the language of the program, if it is not Python: such a row has tests by
standard input only. A column `compare` names how printed text is compared (core/output_rules.py), a
column `checker` holds a program that decides about it.
Invariant: a row without usable tests is a DataError that names its origin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.assert_tests import ambiguous, defined_names, require_usable
from async_rl.core.errors import DataError
from async_rl.core.io_pairs import read_input_output, read_json, read_strings
from async_rl.core.languages import LANGUAGES, PYTHON, Language, language_of
from async_rl.core.output_rules import Checker, read_rules
from async_rl.core.types import (
    AnswerTest,
    AssertTest,
    CodeProblem,
    CodeTest,
    ContainerTest,
    StdinTest,
)
from async_rl.data.files import Row

_GSM8K_ANSWER = re.compile(r"####\s*-?[\d$.]")
_RULES: dict[Any, Literal["gsm8k", "math"]] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
}
# The names that verl uses for its data sets of code.
_CODE_SOURCES = ("code", "codecontests", "apps", "codeforces", "taco")
_HIDDEN = ("tests", "test_list", "test", "input_output", "reward_model", "answer")
"""One of these columns has the tests."""
_REMEDY = (
    "give a column `tests` (list of {kind: stdin|call|assert|answer|container, ...}), `test_list`"
    " (assert statements), `test` with `entry_point`, or `input_output`"
)


def read_hidden(origin: str, row: Row, config: RunConfig) -> tuple[CodeProblem, tuple[str, ...]]:
    """As `read_problem`, with the row itself if a reward function scores it or a function or agent
    leads the rollouts. Such a row needs no tests unless one of its functions needs them.
    """
    reward = config.reward
    if not reward.functions and config.rollout.fn is None:
        return read_problem(origin, row)
    problem = CodeProblem(tests=[])
    shown: tuple[str, ...] = ()
    # An agent may return the reward, so a row without any tests is right.
    has_tests = any(row.get(column) is not None for column in _HIDDEN)
    is_scored_by_agent = config.agent.is_used and not has_tests
    if reward.needs_tests(str(row.get("data_source"))) and not is_scored_by_agent:
        problem, shown = read_problem(origin, row)
    # Parquet has dates and decimals, which JSON lacks: a function receives them as text.
    text = msgspec.json.encode(row, enc_hook=str).decode()
    return msgspec.structs.replace(problem, row=text), shown


def read_problem(origin: str, row: Row) -> tuple[CodeProblem, tuple[str, ...]]:
    """Return (hidden side, assert statements that the prompt must show) of one row. Raises
    DataError.
    """
    tests, setup, shown = _read_layout(origin, row)
    how: dict[str, Any] = {}
    if row.get("compare") is not None:
        how["rules"] = read_rules(origin, _text(origin, "compare", row["compare"]))
    if row.get("checker") is not None:
        how["checker"] = _checker(origin, row["checker"])
    tests = [
        msgspec.structs.replace(test, **how) if isinstance(test, StdinTest) else test
        for test in tests
    ]
    problem = CodeProblem(tests=tests, setup=setup, language=_language(origin, row, tests))
    try:
        # Found here rather than when the first ticket is sent, which would fail.
        msgspec.msgpack.encode(problem)
    except OverflowError as error:
        raise DataError(
            f"{origin}: a test contains an integer of more than 64 bits, which cannot be encoded;"
            " write it as an assert statement"
        ) from error
    # An empty list is usually a mistake of the conversion of a data set.
    if not problem.tests:
        raise DataError(
            f"{origin}: the list of tests is empty, so every program would pass; {_REMEDY}"
        )
    require_usable(origin, problem)
    return problem, shown


def _helpers(prompt: Any, entry_point: Any) -> str:
    """The prompt's code without the function to write, if it defines any other one."""
    try:
        module = ast.parse(prompt if isinstance(prompt, str) else "")
    except SyntaxError:  # a prompt in words
        return ""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    if all(node.name == entry_point for node in functions):
        return ""
    written = [node for node in functions if node.name == entry_point]
    module.body = [node for node in module.body if node not in written]
    return ast.unparse(module)


def _checker(origin: str, value: Any) -> Checker:
    if isinstance(value, str):
        value = read_json(f"{origin}: checker", value)
    try:
        checker = msgspec.convert(value, Checker)
        if checker.language == PYTHON:
            compile(checker.code, "checker", "exec", dont_inherit=True)
    except (msgspec.ValidationError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{origin}: column checker cannot be used ({error}); give {{code: a program, form:"
            " kattis or testlib, language: python or cpp}"
        ) from error
    return checker


def _language(origin: str, row: Row, tests: Sequence[CodeTest]) -> Language:
    given = row.get("language")
    prints = [isinstance(test, StdinTest) for test in tests]
    in_containers = [isinstance(test, ContainerTest) for test in tests]
    # Other tests are about words, or Python themselves; the column may then be a natural language.
    if given is None or not any((*prints, *in_containers)):
        return PYTHON
    language = language_of(_text(origin, "language", given))
    if language is None:
        raise DataError(
            f"{origin}: language={given} is unknown; use one of {', '.join(LANGUAGES)}, or leave"
            " the column out for Python"
        )
    if language != PYTHON and not all(prints) and not all(in_containers):
        raise DataError(
            f"{origin}: programs in {language} are judged by tests of standard input only, or all"
            " in containers; give tests of kind stdin, or set language=python"
        )
    return language


def _read_layout(origin: str, row: Row) -> tuple[list[CodeTest], str, tuple[str, ...]]:
    """Return (tests, setup, assert statements that the prompt must show) of the row's layout."""
    # Our own layout wins where a file has several: it was written for this project.
    if row.get("tests") is not None:
        setup = _text(origin, "setup", row.get("setup") or "")
        return _own_tests(origin, row["tests"]), setup, ()
    if row.get("test_list") is not None:
        shown = tuple(read_strings(f"{origin}: test_list", row["test_list"]))
        setup = "\n".join(read_strings(f"{origin}: test_imports", row.get("test_imports") or []))
        defined = defined_names(str(row.get("code") or row.get("canonical_solution") or ""))
        names = ambiguous(defined, setup)
        return [AssertTest(code=code, names=names) for code in shown], setup, shown
    if isinstance(row.get("test"), list):
        raise DataError(f"{origin}: no column tests, but a list in test; rename it to tests")
    if row.get("test") is not None:
        check = _text(origin, "test", row["test"])
        function = _text(origin, "entry_point", row.get("entry_point"))
        setup = _helpers(row.get("prompt"), function)
        names = ambiguous([function], setup)
        return [AssertTest(code=f"{check}\ncheck({function})", names=names)], setup, ()
    if row.get("input_output") is not None:
        return read_input_output(origin, row["input_output"]), "", ()
    reward_model = row.get("reward_model")
    answer = row.get("answer")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        truth = _ground_truth(origin, row.get("data_source"), reward_model["ground_truth"])
        return truth, "", ()
    # A column `answer` without the mark may be anything, for example a solution in words.
    if isinstance(answer, str) and _GSM8K_ANSWER.search(answer):
        return [AnswerTest(rule="gsm8k", expected=answer)], "", ()
    if answer is not None:
        raise DataError(
            f"{origin}: answer={str(answer)[:80]!r} has no '#### number' at its end; end it with"
            f" '#### ' and the number, or {_REMEDY}"
        )
    raise DataError(f"{origin}: no tests among the columns {sorted(row)}; {_REMEDY}")


def _ground_truth(origin: str, source: Any, truth: Any) -> list[CodeTest]:
    # As verl chooses its reward function, so that its files need no change.
    if source in _RULES:
        expected = _text(origin, "reward_model.ground_truth", truth)
        return [AnswerTest(rule=_RULES[source], expected=expected)]
    if source in _CODE_SOURCES:
        return read_input_output(f"{origin}: reward_model.ground_truth", truth)
    known = ", ".join(sorted([*_RULES, *_CODE_SOURCES]))
    raise DataError(
        f"{origin}: data_source={source} is unknown, so it cannot be scored; use one of {known}, or"
        " add a column `tests`"
    )


def _own_tests(origin: str, value: Any) -> list[CodeTest]:
    if isinstance(value, str):
        value = read_json(f"{origin}: tests", value)
    if isinstance(value, list):
        value = [_without_absent(test) for test in value]
    try:
        return msgspec.convert(value, list[CodeTest])
    except msgspec.ValidationError as error:
        # The message has the number of the test, counted from 0, and the name of the field.
        raise DataError(
            f"{origin}: column tests is not as documented ({error}); {_REMEDY}"
        ) from error


def _without_absent(test: Any) -> Any:
    """The test without its absent fields. In Parquet every struct of a list has the same fields,
    None where absent; only the return value of a call may be None.
    """
    if not isinstance(test, dict):
        return test
    return {
        key: value
        for key, value in test.items()
        if value is not None or (key == "expected" and test.get("kind") == "call")
    }


def _text(origin: str, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{origin}: {column} must be a string, this is a {type(value).__name__}")
    return value
