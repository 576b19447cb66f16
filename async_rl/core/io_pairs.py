"""Tests from pairs of input and output, in the shapes of public data sets. Pure.

An object `{"inputs": [...], "outputs": [...], "fn_name"?: str}` (AReaL, APPS; `input` and `output`
in CodeContests), or a list of `{"input", "output", "fn_name"?, "type"?}` (LiveCodeBench,
PrimeIntellect), or the JSON text of one. Without a function each pair
is a standard input and the output to print, both as a text or as a list of lines. With one, the
lines of a text are JSON arguments and the output is the JSON of the returned value, so a tuple
counts as a list; an input that is a list has the arguments themselves, and its output is the value
or a list with it.
"""

from typing import Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.types import CallTest, CodeTest, StdinTest


def read_input_output(value: Any, function: str = "") -> list[CodeTest]:
    """The tests of one column, an object, a list or its JSON text. function: that the tests call
    unless they name another one. Raises DataError.
    """
    data = read_json("input_output", value) if isinstance(value, str) else value
    if isinstance(data, dict):
        function = data.get("fn_name") or function
        data = _cases(data)
    if not isinstance(data, list) or not all(isinstance(case, dict) for case in data):
        raise DataError(
            f"input_output must hold an object {{inputs, outputs, fn_name?}} or a list of"
            f" {{input, output}}, this is a {type(data).__name__}"
        )
    return [_test(case, function) for case in data]


def _cases(data: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = []
    for name in ("inputs", "outputs"):
        values = data.get(name, data.get(name[:-1]))
        if isinstance(values, str):
            values = read_json(f"input_output.{name}", values)
        if not isinstance(values, list):
            raise DataError(f"input_output.{name} must be a list, this is {str(values)[:80]!r}")
        pairs.append(values)
    if len(pairs[0]) != len(pairs[1]):
        raise DataError(
            f"input_output has {len(pairs[0])} inputs and {len(pairs[1])} outputs; each"
            " input needs its output"
        )
    return [{"input": given, "output": wanted} for given, wanted in zip(*pairs, strict=True)]


def _test(case: dict[str, Any], function: Any) -> CodeTest:
    kind = case.get("testtype") or case.get("type")
    # DeepCoder's rows from LiveCodeBench name the function in each test.
    inner = case.get("metadata")
    named = inner.get("func_name") if isinstance(inner, dict) else None
    function = case.get("fn_name") or named or function
    given = case.get("input")
    wanted = case.get("output")
    if not isinstance(function, str):
        raise DataError(
            f"input_output.fn_name must be a string, this is a {type(function).__name__}"
        )
    if kind in ("stdin", "stdin_stdout"):
        function = ""
    elif kind in ("functional", "function_call") and not function:
        raise DataError("a test calls a function that the row does not name")
    if function and isinstance(given, list):
        return CallTest(function=function, args=given, expected=wanted, types="wrapped")
    if function and kind == "function_call":
        raise DataError(
            f"the input of the function {function} is a text, which may mean several"
            " arguments or one; give a list of its arguments"
        )
    return pair_test(_lines("input", given), _lines("output", wanted), function)


def _lines(name: str, value: Any) -> str:
    """A text, or the text of a list of lines."""
    return "\n".join(read_strings(name, [value] if isinstance(value, str) else value))


def pair_test(given: str, wanted: str, function: str) -> CodeTest:
    """The test of one pair: a call of `function` unless that is empty. Raises DataError."""
    if not function:
        return StdinTest(input=given, output=wanted)
    # One JSON value per line, as in LeetCode's examples.
    args = [read_json("input", line) for line in given.splitlines() if line.strip()]
    expected = read_json("output", wanted)
    return CallTest(function=function, args=args, expected=expected, types="json")


def read_json(name: str, text: str) -> Any:
    """The value of a JSON text. Raises DataError, which starts with the name."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{name} is {text[:80]!r}, which is not JSON ({error}); write values as JSON"
        ) from error


def read_strings(name: str, value: Any) -> list[str]:
    """The value, checked. Raises DataError, which starts with the name."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{name} must be a list of strings, this is {str(value)[:80]!r}")
    return value
