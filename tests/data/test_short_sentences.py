from __future__ import annotations

from async_rl.core.types import AnswerTest
from async_rl.data.problems import read_problem
from async_rl.examples import short_sentences
from async_rl.rewards.responses import is_right


def words(rows: list[short_sentences.Row]) -> set[str]:
    return {row["id"].partition("/")[0] for row in rows}


def test_every_word_has_each_of_five_lengths_and_a_held_out_word_is_in_no_training_prompt() -> None:
    train, held_out = list(short_sentences.train()), list(short_sentences.held_out())
    assert not words(train) & words(held_out)
    assert len(train) == 5 * len(words(train)) == len({row["id"] for row in train})
    assert len(held_out) == 5 * len(words(held_out)) >= 128
    assert list(short_sentences.train()) == train
    first = held_out[:20]
    assert {row["id"].partition("/")[2] for row in first} == {"8", "9", "10", "11", "12"}
    assert first[0]["prompt"] == 'Write one sentence of at most 8 words with the word "apple".'


RIGHT = (
    *("I ate a red apple.", "Apples grow on old trees.", "The child's apple, sadly, fell down."),
    *('"I ate a red apple."', "I put the apple in the box."),
)
WRONG = (
    "I ate one of the red apples at noon.",  # nine words
    "Eat an apple.",  # three words
    *("I ate a red pear.", "We had a pineapple today.", "I ate a red apple"),
    *("I ate. An apple fell.", "I ate a red apple. It was good.", "I ate a\nred apple."),
    *("Apple apple apple apple.", "An apple and two apples.", "It was a a red apple."),
)


def test_the_rows_pattern_decides() -> None:
    problem, shown = read_problem(next(short_sentences.held_out()))
    (test,) = problem.tests
    assert isinstance(test, AnswerTest)
    assert [response for response in RIGHT if not is_right(test, response)] == []
    assert [response for response in WRONG if is_right(test, response)] == []
    assert shown == ()
