from __future__ import annotations

import time
from collections import defaultdict
from decimal import Decimal
from http import HTTPStatus

import pytest

from async_rl.core.output_rules import OutputRules
from async_rl.rewards.extraction import extract_code
from async_rl.sandbox.comparison import Comparison, Returned, failure, shorten
from async_rl.sandbox.values import encode

EXACT = Comparison(relative_tolerance=0)
CONFIGURED = Comparison(relative_tolerance=1e-6)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("9", "9\n"),
        ("1 2 \r\n3\n\n", "1 2\n3"),
        ("1e3", "1000.0"),
        ("3.0", "3"),
        ("-0", "0"),
        ("0.50", ".5"),
        ("a  b", "a b"),
        ("", ""),
        ("12345678901234567890.10", "12345678901234567890.1"),
    ],
)
def test_outputs_that_count_as_equal(got: str, expected: str) -> None:
    assert EXACT.outputs_equal(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("1 2", "2 1"), ("1\n2", "1 2"), ("0.3001", "0.3"), ("9 9", "9"), ("9", "9 9"),
        ("9\n9", "9"), ("nan", "1"), ("1_0", "10"), ("yes", "Yes"), ("", "0"), ("1e400", "inf"),
        ("10000000000000000001", "10000000000000000002"),
        # strings of bits and numbers as text are no numbers
        ("11", "0011"), ("0011", "11"), ("7", "007"), ("\u0663", "3"),
        # floats that round to the expected integer
        ("1e16", "10000000000000001"), ("123456789012345680.0", "123456789012345679"),
        ("123456789012345.68", "123456789012345.67"),
        ("0.30000000000000004", "0.3"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_count_as_equal(got: str, expected: str) -> None:
    assert not EXACT.outputs_equal(got, expected)


@pytest.mark.parametrize(
    ("got", "expected", "exact", "configured", "asked"),
    [
        # numbers within 1e-6 of the expected one, by nobody's tolerance, the configuration's, the
        # problem's own
        ("0.3333333", "0.3333334", False, True, True),
        ("1e-9", "0.0", False, False, True),
        ("999999.5", "1000000", False, False, True),
        ("1e6", "1000000", True, True, True),
        ("0.33", "0.34", False, False, False),
        ("0011", "11", False, False, False),
        ("1e9999", "1e9998", False, False, False),
    ],
)
def test_a_tolerance_counts_only_where_it_is_asked_for(
    got: str, expected: str, exact: bool, configured: bool, asked: bool
) -> None:
    asking = OutputRules(relative_tolerance=1e-6, absolute_tolerance=1e-6)
    assert EXACT.outputs_equal(got, expected) is exact
    assert CONFIGURED.outputs_equal(got, expected) is configured
    assert EXACT.outputs_equal(got, expected, asking) is asked


@pytest.mark.parametrize(
    ("got", "expected", "passing"),
    [
        ("Yes", "YES", {"kattis"}),
        ("a\nb", "a b", {"tokens", "kattis"}),
        ("a  b\n\n", "a b", {"lines", "tokens", "kattis"}),
        ("a b\n", "a b\n", {"lines", "tokens", "kattis", "exact"}),
    ],
)
def test_layout_and_case_are_the_problems_choice(
    got: str, expected: str, passing: set[str]
) -> None:
    rules = {
        "lines": OutputRules(),
        "tokens": OutputRules(layout="tokens"),
        "kattis": OutputRules(layout="tokens", ignores_case=True),
        "exact": OutputRules(layout="exact"),
    }
    found = {name for name, rule in rules.items() if EXACT.outputs_equal(got, expected, rule)}
    assert found == passing


@pytest.mark.parametrize(
    ("value", "expected", "exact", "json"),
    [
        ((1, 2), [1, 2], False, True),
        ([(1, 2)], [[1, 2]], False, True),
        (2, 2.0, False, True),
        (2.0, 2, False, True),
        (True, 1, False, False),
        (True, 1.0, False, False),
        (10**16 + 1, 1e16, False, False),
        ({"a": (1,)}, {"a": [1]}, False, True),
        ("2", 2, False, False),
        (HTTPStatus.OK, 200, False, True),
        (defaultdict(list, {"a": [1]}), {"a": [1]}, False, True),
        ([HTTPStatus.OK], [200], False, True),
        (map(int, "5"), [5], False, False),
        (object(), 5, False, False),
        (Decimal(5), 5, False, False),
        (Decimal("sNaN"), 5, False, False),
    ],
)
def test_values_of_other_types_pass_only_where_json_cannot_tell_them_apart(
    value: object, expected: object, exact: bool, json: bool
) -> None:
    body = encode(value)
    for types, is_right in (("exact", exact), ("json", json)):
        assert (not failure(Returned(body, "f", (), expected, types), EXACT)) is is_right


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        (Decimal(5), 5, True),
        (Decimal("sNaN"), 5, False),
        (HTTPStatus.OK, 200, True),
        (True, 1, True),
        ((1,), [1], False),
        (object(), 5, False),
        (range(3), [0, 1, 2], False),
    ],
)
def test_an_assert_statement_compares_as_python_does(
    value: object, expected: object, is_right: bool
) -> None:
    assert (not failure(Returned(encode(value), "f", (), expected, "python"), EXACT)) is is_right


def test_an_integer_of_many_digits_fits_into_a_message() -> None:
    assert len(shorten(10**20_000)) < 200


def test_a_wrong_output_is_not_read_to_its_end() -> None:
    expected = "1\n" * 1_000_000
    started = time.process_time()
    assert not EXACT.outputs_equal("2\n" * 1_000_000, expected)
    assert time.process_time() - started < 0.05


CODE = "def f(x):\n    return x + 1\n"


@pytest.mark.covers("code extraction")
def test_last_fenced_block_that_parses_is_taken() -> None:
    response = (
        f"First:\n```python\n{CODE}```\nthen\n```python\ndef f(x): return (\n# does not"
        " parse\n```\nand\n```\nshort\n```\n"
    )
    assert extract_code(response, "auto") == CODE
    assert extract_code(response, "fenced") == CODE


def test_response_without_a_fence_is_the_program() -> None:
    assert extract_code(CODE, "auto") == CODE
    assert extract_code(CODE, "whole") == CODE
    assert extract_code(CODE, "fenced") is None


def test_broken_fence_has_no_program_unless_taken_whole() -> None:
    assert extract_code(f"```python\n{CODE}", "auto") is None
    assert extract_code(f"```python\n{CODE}", "whole") == f"```python\n{CODE}"


def test_other_languages_are_skipped() -> None:
    assert extract_code("```bash\npip install something_long\n```", "auto") is None


def test_the_problems_language_chooses_the_block() -> None:
    program = "int main() { return 0; } // ok"
    response = f"```cpp\n{program}\n```\n```python\n{CODE}\n```\n```text\n{program}\n```"
    assert extract_code(response, "auto", "cpp") == f"{program}\n"
    assert extract_code(response.replace("cpp", "C++"), "auto", "cpp") == f"{program}\n"
    assert extract_code(f"```\n{program}\n```", "fenced", "cpp") == f"{program}\n"
    assert extract_code(response, "auto", "rust") is None
    assert extract_code(response, "auto") == f"{CODE}\n"
    # Nothing is parsed: a program that does not compile is a failure of the policy.
    assert extract_code("```rust\nfn main( { no closing }\n```", "auto", "rust") is not None
