from __future__ import annotations

import pytest

from async_rl.core.types import AnswerTest
from async_rl.data.problems import read_problem
from async_rl.examples import short_sentences
from async_rl.rewards.responses import is_right


def words(rows: list[short_sentences.Row]) -> set[str]:
    return {row["id"].partition("/")[0] for row in rows}


def test_a_held_out_word_is_in_no_training_prompt() -> None:
    train, held_out = list(short_sentences.train()), list(short_sentences.held_out())
    assert not words(train) & words(held_out)
    # Every word with each of five lengths, under an id of its own.
    assert len(train) == 5 * len(words(train)) == len({row["id"] for row in train})
    assert len(held_out) == 5 * len(words(held_out)) >= 128
    assert list(short_sentences.train()) == train


def test_the_first_held_out_rows_have_all_lengths() -> None:
    first = list(short_sentences.held_out())[:20]
    assert {row["id"].partition("/")[2] for row in first} == {"8", "9", "10", "11", "12"}
    assert first[0]["prompt"] == 'Write one sentence of at most 8 words with the word "apple".'


@pytest.mark.parametrize(
    ("response", "is_expected"),
    [
        ("I ate a red apple.", True),
        ("Apples grow on old trees.", True),
        ("The child's apple, sadly, fell down.", True),
        ("I ate one of the red apples at noon.", False),  # nine words
        ("Eat an apple.", False),  # three words
        ("I ate a red pear.", False),
        ("We had a pineapple today.", False),
        ("I ate a red apple", False),
        ("I ate. An apple fell.", False),
        ("I ate a red apple. It was good.", False),
        ('"I ate a red apple."', True),
        ("I ate a\nred apple.", False),
        ("Apple apple apple apple.", False),
        ("An apple and two apples.", False),
        ("It was a a red apple.", False),
        ("I put the apple in the box.", True),
    ],
)
def test_the_rows_pattern_decides(response: str, is_expected: bool) -> None:
    problem, shown = read_problem(next(short_sentences.held_out()))
    (test,) = problem.tests
    assert isinstance(test, AnswerTest)
    assert is_right(test, response) is is_expected
    assert shown == ()
