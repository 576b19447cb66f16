"""The order of prompts is a function of k."""

from __future__ import annotations

import pytest

from async_rl.data.order import PromptOrder


def test_every_epoch_holds_every_prompt_once() -> None:
    order = PromptOrder(3, 10)
    for epoch in range(4):
        assert sorted(order.index(epoch * 10 + i) for i in range(10)) == list(range(10))


def test_epochs_are_shuffled_differently() -> None:
    order = PromptOrder(3, 50)
    first, second = ([order.index(epoch * 50 + i) for i in range(50)] for epoch in (0, 1))
    assert first != second != list(range(50))


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    used = PromptOrder(5, 7)
    for k in (20, 3, 0, 41):
        used.index(k)
    assert [used.index(k) for k in range(30)] == [PromptOrder(5, 7).index(k) for k in range(30)]


def test_another_seed_gives_another_order() -> None:
    assert [PromptOrder(0, 50).index(k) for k in range(50)] != [
        PromptOrder(1, 50).index(k) for k in range(50)
    ]


def test_without_shuffle_epochs_run_in_order() -> None:
    order = PromptOrder(0, 3, shuffle=False)
    assert [order.index(k) for k in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_an_order_of_nothing_and_a_negative_place_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, 0)
    with pytest.raises(ValueError, match="negative"):
        PromptOrder(0, 1).index(-1)
