"""The rows that come with the product: the embedded task, and the example short_sentences."""

import pytest
from tables import table

from async_rl.core.types import AnswerTest
from async_rl.data.files import read_rows
from async_rl.data.problems import read_problem
from async_rl.data.prompts import embedded_rows
from async_rl.examples import short_sentences
from async_rl.rewards.responses import is_right
from benchmarks.embedded import list_functions


def test_the_rows_are_those_of_the_specs_and_both_wordings_of_one_are_on_one_side() -> None:
    specs, texts = [], []
    for part, of_part in zip(("train", "held_out"), list_functions.split(), strict=True):
        rows = [row for _, row in read_rows(embedded_rows(part))]
        assert rows == list_functions.rows(of_part)
        assert len({row["id"] for row in rows}) == len(rows) == 2 * len(of_part)
        specs.append({row["id"].partition("/")[0] for row in rows})
        texts.append({row["prompt"] for row in rows})
    assert not specs[0] & specs[1]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize("verdict", ["right", "wrong"])
def test_the_pattern_of_a_row_decides_which_sentences_are_right(verdict: str) -> None:
    problem, _ = read_problem(next(short_sentences.held_out()))
    (test,) = problem.tests
    assert isinstance(test, AnswerTest)
    for response in table(__file__, verdict):
        assert is_right(test, response) == (verdict == "right"), response
