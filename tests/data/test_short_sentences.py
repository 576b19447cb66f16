"""The pattern of a row of the example short_sentences decides which sentences are right."""

import pytest
from tables import table

from async_rl.core.types import AnswerTest
from async_rl.data.problems import read_problem
from async_rl.examples import short_sentences
from async_rl.rewards.responses import is_right


@pytest.mark.parametrize("verdict", ["right", "wrong"])
def test_the_rows_pattern_decides(verdict: str) -> None:
    problem, _ = read_problem(next(short_sentences.held_out()))
    (test,) = problem.tests
    assert isinstance(test, AnswerTest)
    for response in table(__file__, verdict):
        assert is_right(test, response) == (verdict == "right"), response
