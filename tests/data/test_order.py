"""The order of prompts is a function of k."""

from collections import Counter

import numpy as np

from async_rl.data.prompt_file import PromptOrder


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own_seed_and_number() -> None:
    order = PromptOrder(3, 50)
    epochs = [[order.index(epoch * 50 + i) for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    other = [PromptOrder(1, 50).index(k) for k in range(50)]
    assert len({tuple(epoch) for epoch in [*epochs, other, range(50)]}) == 6
    # Whatever was requested before.
    wanted = [epochs[2][20], epochs[0][3], epochs[0][0]]
    assert [PromptOrder(3, 50).index(k) for k in (120, 3, 0)] == wanted


def test_a_source_has_its_share_of_each_epoch_and_its_prompts_take_turns() -> None:
    sources = [(np.arange(30), 1.0), (np.arange(30, 40), 3.0)]
    order = PromptOrder(3, 40, sources=sources)
    epochs = [[order.index(epoch * 40 + i) for i in range(40)] for epoch in range(4)]
    for epoch in epochs:
        # Ten of the 30 prompts of the first source, and each of the ten others three times.
        assert Counter(row >= 30 for row in epoch) == {False: 10, True: 30}
        assert set(Counter(row for row in epoch if row >= 30).values()) == {3}
    first = [row for epoch in epochs[:3] for row in epoch if row < 30]
    assert sorted(first) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = PromptOrder(3, 40, sources=sources)
    assert [other.index(k) for k in (120, 3)] == [epochs[3][0], epochs[0][3]]


def test_a_chosen_row_replaces_that_of_the_order_and_no_other() -> None:
    order, plain = PromptOrder(0, 6), PromptOrder(0, 6)
    order.choose(4, [1, 1])
    expected = [*(plain.index(k) for k in range(4)), 1, 1, plain.index(6)]
    assert [order.index(k) for k in range(7)] == expected
    assert order.drawn(4) == plain.index(4)
