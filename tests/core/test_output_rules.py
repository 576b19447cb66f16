"""The rules of comparing printed text that a row has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import table

from async_rl.core.errors import DataError
from async_rl.core.programs import OutputRules
from async_rl.core.types import StdinTest
from async_rl.data.problems import read_problem

PAIRS = {"inputs": ["1", "2"], "outputs": ["A", "B"]}


@pytest.mark.parametrize("as_given", [dict, json.dumps])
def test_the_column_compare_is_about_every_test_of_a_row_that_prints(as_given: Any) -> None:
    compare = as_given({"layout": "tokens", "ignores_case": True, "relative_tolerance": None})
    problem, _ = read_problem({"input_output": PAIRS, "compare": compare})
    rules = OutputRules(layout="tokens", ignores_case=True)
    assert problem.tests == [
        StdinTest(input="1", output="A", rules=rules),
        StdinTest(input="2", output="B", rules=rules),
    ]


@pytest.mark.parametrize(("compare", "reason"), table(__file__, "rules_that_cannot_be_read"))
def test_rules_that_cannot_be_read_are_refused(compare: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"compare.*{reason}"):
        read_problem({"input_output": PAIRS, "compare": compare})
