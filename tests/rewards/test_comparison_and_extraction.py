from __future__ import annotations

import time
from collections import defaultdict
from decimal import Decimal
from http import HTTPStatus

import pytest
from tables import table

from async_rl.core.programs import OutputRules
from async_rl.rewards.responses import extract_code
from async_rl.sandbox.comparison import Comparison, Returned, failure, shorten
from async_rl.sandbox.values import encode

EXACT = Comparison(relative_tolerance=0)
CONFIGURED = Comparison(relative_tolerance=1e-6)


def test_outputs_count_as_equal_or_not() -> None:
    for is_equal in (True, False):
        for got, expected in table(__file__, "outputs")[is_equal]:
            assert EXACT.outputs_equal(got, expected, OutputRules()) is is_equal, (got, expected)


@pytest.mark.parametrize("case", table(__file__, "tolerances"), ids=str)
def test_a_tolerance_counts_only_where_it_is_asked_for(case: tuple[str, str, set[str]]) -> None:
    got, expected, equal_for = case
    asking = OutputRules(relative_tolerance=1e-6, absolute_tolerance=1e-6)
    found = {
        "nobody": EXACT.outputs_equal(got, expected, OutputRules()),
        "configuration": CONFIGURED.outputs_equal(got, expected, OutputRules()),
        "problem": EXACT.outputs_equal(got, expected, asking),
    }
    assert {who for who, is_equal in found.items() if is_equal} == set(equal_for)


@pytest.mark.parametrize("case", table(__file__, "layouts"), ids=str)
def test_layout_and_case_are_the_problems_choice(case: tuple[str, str, set[str]]) -> None:
    got, expected, passing = case
    rules = {
        "lines": OutputRules(),
        "tokens": OutputRules(layout="tokens"),
        "kattis": OutputRules(layout="tokens", ignores_case=True),
        "exact": OutputRules(layout="exact"),
    }
    found = {name for name, rule in rules.items() if EXACT.outputs_equal(got, expected, rule)}
    assert found == set(passing)


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
        assert (not failure(Returned(body, "f", (), expected, types), 0)) is is_right


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
    assert (not failure(Returned(encode(value), "f", (), expected, "python"), 0)) is is_right


def test_an_integer_of_many_digits_fits_into_a_message() -> None:
    assert len(shorten(10**20_000)) < 200


def test_a_wrong_output_is_not_read_to_its_end() -> None:
    expected = "1\n" * 1_000_000
    started = time.process_time()
    assert not EXACT.outputs_equal("2\n" * 1_000_000, expected, OutputRules())
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
