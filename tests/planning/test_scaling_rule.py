"""How many generators balance a run: by hand, and in a simulated run that the autoscaler steers."""

import random
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import simpy

from async_rl.planning.scaling import (
    Decision,
    Steering,
    Window,
)

AUTO = [1, 8]


def window(
    learner_waits: float, held_back: float, tokens_per_s: float = 0.0, others: int = 0
) -> Window:
    return Window(
        learner_waits=learner_waits,
        held_back=held_back,
        tokens_per_s=tokens_per_s,
        others=others,
    )


def decide(
    count: int, learner_waits: float, held_back: float, *, bounds: Sequence[int], others: int = 0
) -> Decision:
    return Steering(bounds).decide(count, window(learner_waits, held_back, others=others))


@pytest.mark.parametrize(
    ("count", "waits", "held", "wanted"),
    [
        (2, 0.5, 0.0, 4),
        (4, 0.0, 0.75, 1),
        (2, 0.2, 0.0, 3),  # 2.5 would balance: with 3 the learner never waits
        (6, 0.25, 0.12, 7),  # 7.04 would balance: 7 are 99 % as fast
        (4, 0.0, 0.24, 3),  # 3.04 would balance
        (3, 0.0, 0.167, 3),
        (10, 0.09, 0.0, 8),  # above the maximum
        (3, 0.09, 0.0, 3),  # within the tolerance
        (8, 0.0, 0.0999, 8),
        (8, 0.0, 0.15, 7),
        (2, 0.99, 0.0, 4),  # twice as many at most in one decision
    ],
)
def test_decisions_by_hand(count: int, waits: float, held: float, wanted: int) -> None:
    assert decide(count, waits, held, bounds=AUTO).wanted == wanted


def test_generators_of_other_pools_count_in_the_balance_and_stay() -> None:
    assert decide(1, 0.2, 0.0, others=3, bounds=AUTO).wanted == 2  # 5 would balance
    assert decide(3, 0.0, 0.5, others=1, bounds=AUTO).wanted == 1  # 2 would balance


def test_the_reason_tells_the_shares_and_the_balance() -> None:
    reason = decide(2, 0.5, 0.02, bounds=AUTO).reason
    assert (
        reason
        == "the learner waits 50% of the time, generators are held back 2%: 3.9 generators would"
        " balance"
    )


class SimulatedRun:
    """Generators that each make a group in make_s, a learner that takes 4 at a time for step_s, at
    most 12 groups not yet trained.
    """

    def __init__(self, count: int, *, make_s: float, step_s: float, num_cores: int = 100) -> None:
        self.num_cores = num_cores
        self.env = simpy.Environment()
        self.gate = simpy.Container(self.env, capacity=12, init=12)
        self.ready = simpy.Container(self.env, capacity=12)
        self.make_s, self.step_s = make_s, step_s
        self.rng = random.Random(0)
        self.waited_s = self.held_s = 0.0
        self.num_made = 0
        self.count = 0
        self.grow(count)
        self.env.process(self.learner())

    def grow(self, count: int) -> None:
        for rank in range(self.count, count):
            self.env.process(self.generator(rank))
        self.count = count

    def generator(self, rank: int) -> Generator[Any, Any, None]:
        while rank < self.count:
            since = self.env.now
            yield self.gate.get(1)
            self.held_s += self.env.now - since
            yield self.env.timeout(
                self.make_s * self.rng.uniform(0.5, 1.5) * max(1.0, self.count / self.num_cores)
            )
            self.num_made += 1
            yield self.ready.put(1)

    def learner(self) -> Generator[Any, Any, None]:
        while True:
            since = self.env.now
            yield self.ready.get(4)
            self.waited_s += self.env.now - since
            yield self.env.timeout(self.step_s * self.rng.uniform(0.8, 1.2))
            yield self.gate.put(4)

    def window(self, seconds: float) -> tuple[float, float]:
        """(share that the learner waited, share that a generator was held back) of the next so many
        seconds.
        """
        self.waited_s = self.held_s = self.num_made = 0
        self.env.run(self.env.now + seconds)
        return min(self.waited_s / seconds, 1.0), min(self.held_s / seconds / self.count, 1.0)


def steered(
    start: int, *, make_s: float, step_s: float, auto: Sequence[int] = AUTO, num_cores: int = 100
) -> list[int]:
    run, steering = (
        SimulatedRun(start, make_s=make_s, step_s=step_s, num_cores=num_cores),
        Steering(auto),
    )
    run.window(30)
    counts = [start]
    for _ in range(30):
        waits, held = run.window(60)
        run.grow(steering.decide(run.count, window(waits, held, run.num_made)).wanted)
        run.window(30)
        counts.append(run.count)
    return counts


@pytest.mark.parametrize("start", [1, 3, 8])
@pytest.mark.parametrize(("make_s", "step_s"), [(1.0, 1.0), (2.0, 2.0), (1.25, 1.0), (1.0, 1.4)])
def test_a_simulated_run_comes_to_rest_near_its_balance_from_either_side(
    start: int, make_s: float, step_s: float
) -> None:
    counts = steered(start, make_s=make_s, step_s=step_s)
    assert len(set(counts[10:])) == 1, counts
    assert abs(counts[-1] - 4 * make_s / step_s) <= 1.5, counts


@pytest.mark.parametrize(("num_cores", "rest"), [(1, 1), (2, 2)])
def test_generators_that_share_their_cores_are_taken_back_once_and_not_tried_again(
    num_cores: int, rest: int
) -> None:
    counts = steered(rest, make_s=4.0, step_s=1.0, num_cores=num_cores)
    assert counts == [rest, 2 * rest, *[rest] * 29]


def test_what_was_taken_back_says_why_and_what_memory_did_not_allow_is_not_judged() -> None:
    steering = Steering(AUTO)
    assert steering.decide(1, window(0.5, 0.0, 600.0)).wanted == 2
    assert steering.decide(1, window(0.5, 0.0, 500.0)).wanted == 2
    decision = steering.decide(2, window(0.5, 0.0, 610.0))
    told = (
        "1 wrote 500 tokens/s, 2 write 610: they use the same cores or GPUs, so autoscaling adds"
        " no more until the run is resumed"
    )
    assert (decision.wanted, decision.reason) == (1, told)
    assert steering.decide(1, window(0.9, 0.0, 500.0)).wanted == 1


def test_the_bounds_are_kept_and_a_run_outside_them_is_brought_inside() -> None:
    narrow = [2, 3]
    assert set(steered(2, make_s=4.0, step_s=1.0, auto=narrow)[1:]) <= {2, 3}
    assert set(steered(3, make_s=0.1, step_s=1.0, auto=narrow)[1:]) <= {2, 3}
    assert decide(9, 0.0, 0.0, bounds=narrow).wanted == 3
    assert decide(1, 0.0, 0.0, bounds=narrow).wanted == 2
