"""Tests from pairs of input and output text, in the form of AReaL's data and verifier. Pure.

`{"inputs": [str], "outputs": [str], "fn_name"?: str}`, or the same as a JSON string.  Without a
function each pair is a standard input and the output to print; with one, each line of an input is
one JSON argument and the output is the JSON of the returned value, so a tuple counts as a list.
"""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.types import CallTest, CodeTest, StdinTest


def read_input_output(origin: str, value: Any) -> list[CodeTest]:
    """The tests of one `input_output`, an object or its JSON string. Raises DataError, which starts
    with the origin, the position of the text in the data.
    """
    data = read_json(f"{origin}: input_output", value) if isinstance(value, str) else value
    if not isinstance(data, dict):
        raise DataError(
            f"{origin}: input_output must hold an object {{inputs, outputs, fn_name?}}, this is a"
            f" {type(data).__name__}"
        )
    inputs, outputs = (
        read_strings(f"{origin}: input_output.{name}", data.get(name))
        for name in ("inputs", "outputs")
    )
    if len(inputs) != len(outputs):
        raise DataError(
            f"{origin}: input_output has {len(inputs)} inputs and {len(outputs)} outputs; each"
            " input needs its output"
        )
    function = data.get("fn_name") or ""
    if not isinstance(function, str):
        raise DataError(
            f"{origin}: input_output.fn_name must be a string, this is a {type(function).__name__}"
        )
    origins = f"{origin}: input_output.inputs", f"{origin}: input_output.outputs"
    return [
        pair_test(given, wanted, function, origins=origins)
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def pair_test(given: str, wanted: str, function: str, *, origins: tuple[str, str]) -> CodeTest:
    """The test of one pair: a call of `function` unless that is empty. Raises DataError with the
    origin of the text that is wrong.
    """
    if not function:
        return StdinTest(input=given, output=wanted)
    # One JSON value per line, as in LeetCode's examples.
    args = [read_json(origins[0], line) for line in given.splitlines() if line.strip()]
    expected = read_json(origins[1], wanted)
    return CallTest(function=function, args=args, expected=expected, types="json")


def read_json(origin: str, text: str) -> Any:
    """The value of a JSON text. Raises DataError, which names the origin first."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{origin} is {text[:80]!r}, which is not JSON ({error}); write values as JSON"
        ) from error


def read_strings(origin: str, value: Any) -> list[str]:
    """The value, checked. Raises DataError, which names the origin first."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{origin} must be a list of strings, this is {str(value)[:80]!r}")
    return value
