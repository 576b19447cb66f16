from __future__ import annotations

import time
from collections import defaultdict
from decimal import Decimal
from http import HTTPStatus

import pytest
from tables import table

from async_rl.config.rewards import Extraction
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


# Value, expected value, the types of tests that take it for right.
VALUES = [
    ((1, 2), [1, 2], "json"), ([(1, 2)], [[1, 2]], "json"), (2, 2.0, "json python"),
    (2.0, 2, "json python"), (True, 1, "python"), (True, 1.0, "python"),
    (10**16 + 1, 1e16, ""), ({"a": (1,)}, {"a": [1]}, "json"), ("2", 2, ""),
    (HTTPStatus.OK, 200, "json python"), ([HTTPStatus.OK], [200], "json python"),
    (defaultdict(list, {"a": [1]}), {"a": [1]}, "json python"), (map(int, "5"), [5], ""),
    (object(), 5, ""), (Decimal(5), 5, "python"), (Decimal("sNaN"), 5, ""), ((1,), [1], "json"),
    (range(3), [0, 1, 2], ""),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected", "right"), VALUES)
def test_values_of_other_types_pass_only_where_json_or_python_cannot_tell_them_apart(
    value: object, expected: object, right: str
) -> None:
    body = encode(value)
    kinds = ("exact", "json", "python")
    found = [kind for kind in kinds if not failure(Returned(body, "f", (), expected, kind), 0)]
    assert found == right.split()


@pytest.mark.parametrize(("tolerance", "got", "expected", "passes"), [
    (1e-9, 1.0000001, 1.0, False), (1e-6, 1.0000001, 1.0, True), (1e-6, 1.00001, 1.0, False),
    (0.0, 0.1 + 0.2, 0.3, False), (1e-9, 0.1 + 0.2, 0.3, True),
    (1e-6, 1e-10, 0.0, True), (0.0, 1e-300, 0.0, False),
])  # fmt: skip
def test_tolerance_bounds_the_relative_difference(
    tolerance: float, got: float, expected: float, passes: bool
) -> None:
    comparison = Comparison(relative_tolerance=tolerance)
    assert comparison.values_equal([got], [expected]) is passes
    texts = f"x {got!r}", f"x {expected!r}"
    assert expected == 0.0 or comparison.outputs_equal(*texts, OutputRules()) is passes


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


@pytest.mark.parametrize(
    ("response", "mode", "program"),
    [
        (CODE, "auto", CODE), (CODE, "whole", CODE), (CODE, "fenced", None),
        (f"```python\n{CODE}", "auto", None), (f"```python\n{CODE}", "whole", f"```python\n{CODE}"),
        ("```bash\npip install something_long\n```", "auto", None),
    ],
)  # fmt: skip
def test_a_response_without_a_usable_block_is_the_program_itself_or_has_none(
    response: str, mode: Extraction, program: str | None
) -> None:
    assert extract_code(response, mode) == program


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
