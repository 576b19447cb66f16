"""From the columns of a row to the tests of a programming problem, in six layouts.

- `tests` (with optional `setup`): our own, a list of {kind: stdin | call | assert | answer, ...},
  or the same as a JSON string.
- `test_list` (with optional `test_imports`): assert statements, as in MBPP.  They name the
  function, so the prompt has to show them.
- `test` and `entry_point`: a function check(candidate) and the name of what it is given, as in
  HumanEval.
- `reward_model` {style, ground_truth}, as in verl: by `data_source` an answer in words, or for code
  what `input_output` holds.
- `answer` that ends with `#### number`, as in GSM8K.
- `input_output`: a JSON string or an object {inputs, outputs, fn_name?}, as in AReaL; with
  `fn_name` each line of an input is one argument.
Invariant: a row without usable tests is a DataError that names its place.  Used by prompts.py.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from async_rl.config.reward_terms import functions_of, needs_tests
from async_rl.config.rewards import RewardConfig
from async_rl.core.errors import DataError
from async_rl.core.io_pairs import read_input_output
from async_rl.core.types import AnswerTest, AssertTest, CodeProblem, CodeTest
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
_CODE_SOURCES = ("code", "codecontests", "apps", "codeforces", "taco")
_REMEDY = (
    "give a column `tests` (list of {kind: stdin|call|assert|answer, ...}), `test_list` (assert"
    " statements), `test` with `entry_point`, or `input_output`"
)


def read_hidden(
    place: str, row: Row, reward: RewardConfig, *, has_rollout: bool = False
) -> tuple[CodeProblem, tuple[str, ...]]:
    """As `read_problem`; where functions score the row it comes along, and needs no tests of its
    own if none of them asks for any.

    has_rollout: a function leads the rollouts, which gets the row too.
    """
    source = row.get("data_source")
    if not functions_of(reward) and not has_rollout:
        return read_problem(place, row)
    problem, shown = (
        read_problem(place, row)
        if needs_tests(reward, str(source))
        else (CodeProblem(tests=[]), ())
    )
    return (
        msgspec.structs.replace(problem, row=msgspec.json.encode(row, enc_hook=str).decode()),
        shown,
    )


def read_problem(place: str, row: Row) -> tuple[CodeProblem, tuple[str, ...]]:
    """(hidden side, assert statements that the prompt must show) of one row. Raises DataError."""
    if row.get("tests") is not None:
        problem = CodeProblem(
            tests=_own_tests(place, row["tests"]),
            setup=_text(place, "setup", row.get("setup") or ""),
        )
        shown: tuple[str, ...] = ()
    elif row.get("test_list") is not None:
        shown = tuple(_texts(place, "test_list", row["test_list"]))
        setup = "\n".join(_texts(place, "test_imports", row.get("test_imports") or []))
        problem = CodeProblem(tests=[AssertTest(code=code) for code in shown], setup=setup)
    elif row.get("test") is not None:
        check = f"{_text(place, 'test', row['test'])}\ncheck({_text(place, 'entry_point', row.get('entry_point'))})"
        problem, shown = CodeProblem(tests=[AssertTest(code=check)]), ()
    elif row.get("input_output") is not None:
        problem, shown = CodeProblem(tests=read_input_output(place, row["input_output"])), ()
    elif (
        isinstance(row.get("reward_model"), dict)
        and row["reward_model"].get("ground_truth") is not None
    ):
        problem, shown = CodeProblem(tests=_ground_truth(place, row)), ()
    elif isinstance(row.get("answer"), str) and _GSM8K_ANSWER.search(row["answer"]):
        problem, shown = CodeProblem(tests=[AnswerTest(rule="gsm8k", expected=row["answer"])]), ()
    else:
        raise DataError(f"{place}: no tests among the columns {sorted(row)}; {_REMEDY}")
    try:
        msgspec.msgpack.encode(problem)
    except OverflowError as error:
        raise DataError(
            f"{place}: a test holds an integer of more than 64 bits, which cannot travel; write it"
            " as an assert statement"
        ) from error
    if not problem.tests:
        raise DataError(
            f"{place}: the list of tests is empty, so every program would pass; {_REMEDY}"
        )
    return problem, shown


def _ground_truth(place: str, row: Row) -> list[CodeTest]:
    source, truth = row.get("data_source"), row["reward_model"]["ground_truth"]
    if source in _RULES:
        return [
            AnswerTest(
                rule=_RULES[source], expected=_text(place, "reward_model.ground_truth", truth)
            )
        ]
    if source in _CODE_SOURCES:
        return read_input_output(f"{place}: reward_model.ground_truth", truth)
    known = ", ".join(sorted([*_RULES, *_CODE_SOURCES]))
    raise DataError(
        f"{place}: data_source={source} is not known, so nobody can score it; known are {known}; or"
        " give a column `tests`"
    )


def _own_tests(place: str, value: Any) -> list[CodeTest]:
    if isinstance(value, str):
        value = _json(place, "tests", value)
    if isinstance(value, list):
        value = [_without_absent(test) for test in value]
    try:
        return msgspec.convert(value, list[CodeTest])
    except msgspec.ValidationError as error:
        raise DataError(
            f"{place}: column tests is not as documented ({error}); {_REMEDY}"
        ) from error


def _without_absent(test: Any) -> Any:
    """Parquet gives every struct of a list the same fields, None where absent; only the value that
    a call returns may be None.
    """
    if not isinstance(test, dict):
        return test
    return {
        key: value
        for key, value in test.items()
        if value is not None or (key == "expected" and test.get("kind") == "call")
    }


def _json(place: str, column: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{place}: {column} holds {text[:80]!r}, which is no JSON ({error}); write values as"
            " JSON"
        ) from error


def _text(place: str, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {column} must be a string, this is a {type(value).__name__}")
    return value


def _texts(place: str, column: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{place}: {column} must be a list of strings, this is {str(value)[:80]!r}")
    return value
