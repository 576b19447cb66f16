"""The order of prompts is a function of k."""

from __future__ import annotations

from async_rl.data.prompt_file import PromptOrder


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own_seed_and_number() -> None:
    order = PromptOrder(3, 50)
    epochs = [[order.index(epoch * 50 + i) for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    other = [PromptOrder(1, 50).index(k) for k in range(50)]
    assert len({tuple(epoch) for epoch in [*epochs, other, range(50)]}) == 6
    # Whatever was requested before.
    assert [PromptOrder(3, 50).index(k) for k in (120, 3, 0)] == [
        epochs[2][20],
        epochs[0][3],
        epochs[0][0],
    ]


def test_without_shuffle_epochs_run_in_order() -> None:
    order = PromptOrder(0, 3, shuffle=False)
    assert [order.index(k) for k in range(7)] == [0, 1, 2, 0, 1, 2, 0]
