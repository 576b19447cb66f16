"""Facts about whose handover a shared device is, in interleavings of crashes, restarts, late
messages, deadlines and joins.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from async_rl.core.errors import WeightsError
from async_rl.weights.handovers import Handovers, Orders
from async_rl.weights.membership import Life

A, B = ("a", 1), ("b", 2)


def test_the_learner_waits_for_every_generator_that_serves_in_this_handover() -> None:
    handovers = Handovers(5)
    handovers.ask()
    assert handovers.to_order([A, B]) == {A, B}
    assert handovers.to_order([A, B]) == set()
    handovers.sleeps(A)
    assert not handovers.is_clear([A, B])
    handovers.sleeps(B)
    assert handovers.is_clear([A, B])
    assert handovers.number == 6
    handovers.ask()
    handovers.sleeps(A)  # it has no order in this handover
    assert not handovers.is_clear([A])


@dataclass
class Generator:
    orders: Orders = field(default_factory=Orders)
    uses_device: bool = False


@dataclass
class Letter:
    """On its way, for as long as it takes. handover: of the learner when it was sent."""

    handover: int
    life: Life
    wakes: bool


@pytest.mark.parametrize("seed", range(40))
def test_learner_and_generators_never_use_the_device_together(seed: int) -> None:
    """Generators come and die, the learner dies in any phase or waits no longer for an answer,
    letters arrive late and in any order, to whoever still lives, and answers are lost.
    """
    drawn = random.Random(seed)
    generators: dict[Life, Generator] = {}
    letters: list[Letter] = []
    learner, uses_device, asks = Handovers(0), False, False
    num_steps = 0

    def arrive(letter: Letter) -> None:
        generator = generators[letter.life]
        try:
            generator.orders.accept(letter.handover)
        except WeightsError:
            assert letter.handover < learner.number, "the present order is always obeyed"
            return
        generator.uses_device = letter.wakes
        if letter.handover == learner.number and not letter.wakes and drawn.random() < 0.9:
            learner.sleeps(letter.life)

    def send(lives: Iterable[Life], *, wakes: bool) -> None:
        letters.extend(Letter(learner.number, life, wakes) for life in sorted(lives))

    for number in range(600):
        match drawn.randrange(8):
            case 0 if len(generators) < 3:
                generators[f"g{number}", number] = Generator()
            case 1 if generators and drawn.random() < 0.15:
                lost = drawn.choice(sorted(generators))
                del generators[lost]
                letters = [letter for letter in letters if letter.life != lost]
            case 2 | 3 if letters:
                arrive(letters.pop(drawn.randrange(len(letters))))
            case 4 if drawn.random() < 0.2:
                # The next life starts above all numbers of this one.
                learner, uses_device, asks = Handovers(learner.number + 10), False, True
                learner.ask()
            case 5 if not (asks or uses_device):
                learner.ask()
                asks = True
            case 6 if asks:
                send(learner.to_order(generators), wakes=False)
                uses_device = learner.is_clear(generators)
                asks = not uses_device
                num_steps += uses_device
            case 7 if uses_device:
                uses_device = False
                send(generators, wakes=True)
        assert not (uses_device and any(it.uses_device for it in generators.values()))
    assert num_steps > 1
