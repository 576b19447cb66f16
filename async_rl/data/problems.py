"""From the columns of a row to the tests of a programming problem, in the layouts of layouts.toml.

- own: the column `tests` (with optional `setup`), a list of {kind: stdin | call | assert | answer |
  container, ...}, or the same as a JSON string.
- asserts: assert statements, as in MBPP.  They name the function, so the prompt has to show them. A
  name of Python or of the imports is the program's if the reference solution (`code` or
  `canonical_solution`) defines it.
- script: Python code that calls the program; its function check(candidate), as in HumanEval, is
  called with `entry_point`. Helpers that the prompt defines belong to the test: a program that
  answered for them could let any answer pass.
- pairs: inputs with outputs, in the shapes of core/io_pairs.py, for standard input or, if the tests
  or the column `func_name` name a function, for its calls.
- verl: `reward_model` {style, ground_truth}: by `data_source` an answer in words, or pairs.
- answer: `answer` with `#### number` at its end, as in GSM8K.
A column `language` names the language of the program, if it is not Python: such a row has tests by
standard input only. A column `compare` says how printed text is compared (core/programs.py), a
column `checker` holds a program that decides about it, and so does `generated_checker` of
open-r1/codeforces.
Invariant: a row without usable tests is a DataError.
"""

import ast
import base64
import pickletools
import re
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from async_rl.core.assert_tests import ambiguous, defined_names, require_usable
from async_rl.core.errors import DataError, at
from async_rl.core.io_pairs import read_input_output, read_json, read_strings
from async_rl.core.programs import LANGUAGES, PYTHON, Checker, Language, OutputRules, language_of
from async_rl.core.records import read_packaged
from async_rl.core.types import (
    AnswerTest,
    AssertTest,
    CodeProblem,
    CodeTest,
    ContainerTest,
    StdinTest,
)
from async_rl.data.files import Row


class Layout(msgspec.Struct, frozen=True):
    """A layout of rows; layouts.toml has the meaning of the fields."""

    name: str
    form: str
    has: list[str]
    tests: list[str] = []
    prompt: list[str] = []
    setup: list[str] = []


class _Table(msgspec.Struct, frozen=True):
    layouts: list[Layout]
    prompts: list[str]
    inside: dict[str, list[str]]
    refused: dict[str, list[str]]
    sources: dict[str, Literal["gsm8k", "math", "pairs"]]


TABLE = read_packaged(__package__, "layouts.toml", _Table)
_GSM8K_ANSWER = re.compile(r"####\s*-?[\d$.]")
_REMEDY = (
    "give a column `tests` (list of {kind: stdin|call|assert|answer|container, ...}), `test_list`"
    " (assert statements), `test` with `entry_point`, or `input_output`"
)


def read_problem(row: Row) -> tuple[CodeProblem, tuple[str, ...]]:
    """Return (hidden side, assert statements that the prompt must show) of one row. Raises
    DataError.
    """
    row = unfolded(row)
    tests, setup, shown = _read_layout(row)
    how: dict[str, Any] = {}
    if row.get("compare") is not None:
        how["rules"] = _read("compare", row["compare"], OutputRules, "see docs/verifier.md")
    checker = row.get("checker")
    if checker is None and row.get("generated_checker"):
        checker = {"code": row["generated_checker"], "form": "printed"}
    if checker is not None:
        how["checker"] = _checker(checker)
    tests = [
        msgspec.structs.replace(test, **how) if isinstance(test, StdinTest) else test
        for test in tests
    ]
    problem = CodeProblem(tests=tests, setup=setup, language=_language(row, tests))
    try:
        # Found here rather than when the first ticket is sent, which would fail.
        msgspec.msgpack.encode(problem)
    except OverflowError as error:
        raise DataError(
            "a test contains an integer of more than 64 bits, which cannot be encoded;"
            " write it as an assert statement"
        ) from error
    # An empty list is usually a mistake of the conversion of a data set.
    if not problem.tests:
        raise DataError(f"the list of tests is empty, so every program would pass; {_REMEDY}")
    require_usable(problem)
    return problem, shown


def unfolded(row: Row) -> Row:
    """The row with the keys that `inside` of layouts.toml names as columns."""
    for column, names in TABLE.inside.items():
        value = _decoded(row.get(column))
        if isinstance(value, dict):
            found = {name: value[name] for name in names if name in value}
            row = found | {name: each for name, each in row.items() if each is not None}
    return row


def layout_of(row: Row) -> Layout | None:
    """The layout of an unfolded row, None if it has no tests."""
    for layout in TABLE.layouts:
        has_all = all(row.get(column) is not None for column in layout.has)
        if has_all and (layout.form != "own" or _is_own(row["tests"])):
            return layout
    return None


def _is_own(tests: Any) -> bool:
    """Return whether a column `tests` has our own tests, also if they have errors."""
    tests = _decoded(tests)
    first = tests[0] if isinstance(tests, list) and tests else tests
    return not isinstance(first, dict) or "kind" in first


def _decoded(value: Any) -> Any:
    """The value of a JSON text; any other value as it is."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


def _read_layout(row: Row) -> tuple[list[CodeTest], str, tuple[str, ...]]:
    """Return (tests, setup, lines that the prompt must show) of the row's layout."""
    layout = layout_of(row)
    if layout is None:
        raise DataError(f"no tests among the columns {sorted(row)}; {_REMEDY}")
    values = [row[column] for column in layout.tests or layout.has]
    if layout.form == "own":
        # Our own rows say themselves what the prompt shows.
        setup = _text("setup", row.get("setup") or "")
        return _read("tests", row["tests"], list[CodeTest], _REMEDY), setup, ()
    tests: list[CodeTest] = []
    setup = ""
    shown: Sequence[str] = ()
    if row.get("test_list") is not None:
        shown = read_strings("test_list", row["test_list"])
    if layout.form == "asserts":
        for column in layout.setup:
            part = row.get(column) or []
            lines = [part] if isinstance(part, str) else part
            setup = "\n".join([setup, *read_strings(column, lines)]).strip()
        defined = defined_names(str(row.get("code") or row.get("canonical_solution") or ""))
        names = ambiguous(defined, setup)
        codes = read_strings(layout.has[0], values[0])
        tests += [AssertTest(code=code, names=names) for code in codes]
    elif layout.form == "script":
        tests, setup = _script(row)
    elif layout.form == "pairs":
        for column, allowed in TABLE.refused.items():
            # A row that has a checker can be interactive.
            is_checked = column == "interaction_format" and row.get("checker")
            value = row.get(column) or ""
            if value not in allowed and not is_checked:
                raise DataError(
                    f"{column}={str(value)[:80]}, but programs are judged by their standard output;"
                    " leave the row out"
                )
        # The columns of rStar-Coder are the keys of one object.
        for value in [row] if layout.has[0] == "inputs" else values:
            pairs = _unpacked(layout.has[0], value)
            tests += read_input_output(pairs, row.get("func_name") or "")
    elif layout.form == "verl":
        tests = _ground_truth(row)
    # A column `answer` without the mark may be anything, for example a solution in words.
    elif isinstance(row["answer"], str) and _GSM8K_ANSWER.search(row["answer"]):
        tests.append(AnswerTest(rule="gsm8k", expected=row["answer"]))
    else:
        raise DataError(
            f"answer={str(row['answer'])[:80]!r} has no '#### number' at its end; end it"
            f" with '#### ' and the number, or {_REMEDY}"
        )
    return tests, setup, tuple(shown)


def _script(row: Row) -> tuple[list[CodeTest], str]:
    """Return (the test, its setup) of a row with Python code that calls the program."""
    if isinstance(row["test"], list):
        raise DataError("no column tests, but a list in test; rename it to tests")
    code = _text("test", row["test"])
    if "check" not in defined_names(code):
        return [AssertTest(code=code, names=ambiguous([str(row.get("entry_point"))], ""))], ""
    function = _text("entry_point", row.get("entry_point"))
    setup = _helpers(row.get("prompt"), function)
    names = ambiguous([function], setup)
    return [AssertTest(code=f"{code}\ncheck({function})", names=names)], setup


def _helpers(prompt: Any, entry_point: Any) -> str:
    """The prompt's code without the function to write, if it defines any other one."""
    try:
        module = ast.parse(prompt if isinstance(prompt, str) else "")
    except SyntaxError:  # a prompt in words
        return ""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            raise DataError(
                f"the prompt defines class {node.name} for the test and the program, but"
                " their objects are in two processes; leave the row out"
            )
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    written = [node for node in functions if node.name == entry_point]
    if written == functions:
        return ""
    module.body = [node for node in module.body if node not in written]
    return ast.unparse(module)


def _unpacked(name: str, text: Any) -> Any:
    """The JSON text of tests that LiveCodeBench has packed; any other value as it is. Raises
    DataError.

    Only for files of the user's: a packed text may be large.
    """
    if not isinstance(text, str) or text.lstrip()[:1] in ("{", "["):
        return text
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        # The only value is a text. Reading the operations executes nothing.
        return next(arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str))
    except (zlib.error, ValueError, StopIteration) as error:
        raise DataError(
            f"{name} is {text[:80]!r}, which is not JSON and not packed as in LiveCodeBench"
            f" ({error}); write values as JSON"
        ) from error


def _ground_truth(row: Row) -> list[CodeTest]:
    # As verl chooses its reward function, so that its files need no change.
    model = row["reward_model"]
    source = row.get("data_source")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    rule = TABLE.sources.get(source) if isinstance(source, str) else None
    if rule == "pairs":
        with at("reward_model.ground_truth"):
            return read_input_output(truth)
    if rule is not None:
        return [AnswerTest(rule=rule, expected=_text("reward_model.ground_truth", truth))]
    raise DataError(
        f"data_source={source} is unknown, so it cannot be scored; use one of"
        f" {', '.join(sorted(TABLE.sources))}, or"
        " add a column `tests`"
    )


def _checker(value: Any) -> Checker:
    remedy = "give {code: a program, form: kattis or testlib, language, interacts}"
    checker: Checker = _read("checker", value, Checker, remedy)
    try:
        if checker.language == PYTHON:
            compile(checker.code, "checker", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"column checker does not compile ({error}); correct it") from error
    return checker


def _language(row: Row, tests: Sequence[CodeTest]) -> Language:
    given = row.get("language")
    kinds = {type(test) for test in tests}
    # Other tests are about words, or Python themselves; the column may then be a natural language.
    if given is None or not kinds & {StdinTest, ContainerTest}:
        return PYTHON
    language = language_of(_text("language", given))
    if language is None:
        raise DataError(
            f"language={given} is unknown; use one of {', '.join(LANGUAGES)}, or leave"
            " the column out for Python"
        )
    if language != PYTHON and kinds not in ({StdinTest}, {ContainerTest}):
        raise DataError(
            f"programs in {language} are judged by tests of standard input only, or all in"
            " containers; give tests of kind stdin, or set language=python"
        )
    return language


def _read(column: str, value: Any, kind: Any, remedy: str) -> Any:
    """The value of a column that has an object, a list of objects, or the JSON text of one."""
    if isinstance(value, str):
        value = read_json(column, value)
    value = [*map(_without_absent, value)] if isinstance(value, list) else _without_absent(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # The message has the number of the object, counted from 0, and the name of the field.
        raise DataError(f"column {column} is not as documented ({error}); {remedy}") from error


def _without_absent(given: Any) -> Any:
    """The object without its absent fields. In Parquet every struct of a column has the same
    fields, None where absent; only the return value of a call may be None.
    """
    if not isinstance(given, dict):
        return given
    return {
        key: value
        for key, value in given.items()
        if value is not None or (key == "expected" and given.get("kind") == "call")
    }


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{column} must be a string, this is a {type(value).__name__}")
    return value
