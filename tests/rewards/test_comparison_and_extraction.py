from __future__ import annotations

import pytest

from async_rl.rewards.extraction import extract_code
from async_rl.rewards.verifier.comparison import Comparison

outputs_equal = Comparison(relative_tolerance=1e-9, checker=None).outputs_equal


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("9", "9\n"),
        ("1 2 \n3\n\n", "1 2\n3"),
        ("0.30000000000000004", "0.3"),
        ("1e3", "1000.0"),
        ("a  b", "a b"),
        ("", ""),
        ("007", "7"),
    ],
)
def test_outputs_that_count_as_equal(got: str, expected: str) -> None:
    assert outputs_equal(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [("1 2", "2 1"), ("1\n2", "1 2"), ("0.3001", "0.3"), ("9 9", "9"), ("nan", "1"),
    ("1_0", "10"), ("10000000000000000001", "10000000000000000002"), ("yes", "Yes")],
)  # fmt: skip
def test_outputs_that_do_not_count_as_equal(got: str, expected: str) -> None:
    assert not outputs_equal(got, expected)


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
