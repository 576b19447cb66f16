"""Rules of comparison by the names that contests use."""

from __future__ import annotations

import pytest

from async_rl.core.errors import DataError
from async_rl.core.output_rules import OutputRules, read_rules
from async_rl.core.types import StdinTest
from async_rl.data.problems import read_problem


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("livecodebench", OutputRules()),
        ("kattis", OutputRules(layout="tokens", ignores_case=True)),
        ("kattis case_sensitive", OutputRules(layout="tokens")),
        (
            "kattis case_sensitive space_change_sensitive",
            OutputRules(layout="exact"),
        ),
        (
            "kattis float_tolerance 1e-6",
            OutputRules(
                layout="tokens",
                ignores_case=True,
                relative_tolerance=1e-6,
                absolute_tolerance=1e-6,
            ),
        ),
        (
            "kattis float_relative_tolerance 1e-4 float_absolute_tolerance 1e-9",
            OutputRules(
                layout="tokens",
                ignores_case=True,
                relative_tolerance=1e-4,
                absolute_tolerance=1e-9,
            ),
        ),
        ("codeforces lcmp", OutputRules()),
        ("codeforces wcmp", OutputRules(layout="tokens")),
        ("codeforces nyesno", OutputRules(layout="tokens", ignores_case=True)),
        (
            "codeforces rcmp4",
            OutputRules(layout="tokens", relative_tolerance=1e-4, absolute_tolerance=1e-4),
        ),
    ],
)
def test_each_contest_names_its_rules(text: str, rules: OutputRules) -> None:
    assert read_rules(text) == rules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is unknown; use livecodebench"),
        ("topcoder", "is unknown; use livecodebench"),
        ("codeforces mine", "wcmp, ncmp"),
        ("kattis float_tolerance", "wrong flag or number"),
        ("kattis float_tolerance -1", "wrong flag or number"),
        ("kattis float_tolerance nan", "wrong flag or number"),
        ("kattis loud 1", "wrong flag or number"),
    ],
)
def test_a_name_that_is_unknown_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"^compare=.*{reason}"):
        read_rules(text)


def test_the_column_compare_is_about_every_test_of_a_row_that_prints() -> None:
    pairs = {"inputs": ["1", "2"], "outputs": ["A", "B"]}
    problem, _ = read_problem({"input_output": pairs, "compare": "codeforces yesno"})
    rules = OutputRules(layout="tokens", ignores_case=True)
    assert problem.tests == [
        StdinTest(input="1", output="A", rules=rules),
        StdinTest(input="2", output="B", rules=rules),
    ]
