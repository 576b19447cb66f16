"""Facts about whose handover a shared device is, over interleavings of crashes, restarts, late
messages, deadlines and joins.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.core.errors import WeightsError
from async_rl.weights.handovers import Handovers, Orders
from async_rl.weights.membership import Answer, Life, Load, Membership

A, B = ("a", 1), ("b", 2)


def test_the_learner_waits_for_every_generator_that_serves() -> None:
    handovers = Handovers(5)
    handovers.ask()
    assert handovers.to_order([A, B]) == {A, B}
    assert handovers.to_order([A, B]) == set()
    handovers.sleeps(A)
    assert not handovers.is_clear([A, B])
    handovers.sleeps(B)
    assert handovers.is_clear([A, B])
    assert handovers.number == 6


def test_a_confirmation_of_an_earlier_handover_does_not_count() -> None:
    handovers = Handovers(0)
    handovers.ask()
    handovers.to_order([A])
    handovers.sleeps(A)
    assert handovers.is_clear([A])
    handovers.ask()
    handovers.sleeps(A)  # it has no order in this handover
    assert not handovers.is_clear([A])


def test_an_order_of_an_earlier_handover_is_refused() -> None:
    orders = Orders()
    orders.accept(7)
    orders.accept(7)
    with pytest.raises(WeightsError, match="an order of handover 6 came after one of handover 7"):
        orders.accept(6)


class Kind(enum.Enum):
    SLEEP = enum.auto()
    WAKE = enum.auto()


@dataclass
class Generator:
    """One life. doomed: cut off, so it will be killed, and may do anything that it was told until
    then.
    """

    orders: Orders = field(default_factory=Orders)
    uses_device: bool = False
    doomed: bool = False


@dataclass
class Learner:
    """One life, as training/pushing.py and training/device.py drive it."""

    handovers: Handovers
    number: int
    membership: Membership = field(default_factory=Membership)
    version: int = 0
    is_asking: bool = True
    uses_device: bool = False


@dataclass
class Letter:
    """On its way, for as long as it takes; `load` of a push."""

    learner: int
    life: Life
    kind: Kind
    handover: int
    load: Load | None = None


class World(RuleBasedStateMachine):
    """Generators come, die, hang; the learner dies in any phase; letters arrive late and in any
    order, to whoever still lives.
    """

    @initialize()
    def start(self) -> None:
        self.clock = 0
        self.num_lives = 0
        self.num_learners = 0
        self.generators: dict[Life, Generator] = {}
        self.letters: list[Letter] = []
        self.learner: Learner | None = None

    @property
    def present(self) -> set[Life]:
        return set(self.generators)

    # ---- generators

    @precondition(lambda self: len(self.generators) < 3)
    @rule()
    def join(self) -> None:
        self.num_lives += 1
        self.generators[f"g{self.num_lives % 3}", self.num_lives] = Generator()

    @precondition(lambda self: self.generators)
    @rule(data=st.data())
    def generator_dies(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(sorted(self.generators)))
        del self.generators[life]
        self.letters = [letter for letter in self.letters if letter.life != life]
        if self.learner is not None:
            self.learner.membership.follow(self.present)

    @precondition(lambda self: self.letters)
    @rule(data=st.data(), is_answered=st.booleans())
    def letter_arrives(self, data: st.DataObject, is_answered: bool) -> None:
        """is_answered: else its answer is lost, or it hangs."""
        self._arrive(
            self.letters.pop(data.draw(st.integers(0, len(self.letters) - 1))), is_answered
        )

    def _arrive(self, letter: Letter, is_answered: bool = True) -> None:
        generator, learner = self.generators[letter.life], self.learner
        is_asker_there = learner is not None and learner.number == letter.learner
        try:
            generator.orders.accept(letter.handover)
        except WeightsError:
            assert not is_asker_there, "the learner that lives is always obeyed"
            return
        generator.uses_device = letter.kind is Kind.WAKE
        if learner is None or not is_asker_there or generator.doomed:
            return
        if not is_answered:
            self._give_up(letter)
        elif letter.kind is Kind.SLEEP:
            learner.handovers.sleeps(letter.life)
        elif letter.load is not None:
            self._expel(learner.membership.answer(letter.load, letter.life, Answer.LOADED))

    # ---- the learner

    @precondition(lambda self: self.learner is None)
    @rule(pause=st.integers(1, 3))
    def learner_starts(self, pause: int) -> None:
        self.clock += 10 * pause
        self.num_learners += 1
        self.learner = Learner(handovers=Handovers(self.clock), number=self.num_learners)
        self.learner.membership.follow(self.present)
        self.learner.handovers.ask()

    @precondition(lambda self: self.learner is not None)
    @rule()
    def learner_dies(self) -> None:
        self.clock = max(self.clock, self.learner.handovers.number) if self.learner else self.clock
        self.learner = None
        for (
            generator
        ) in self.generators.values():  # the supervisor still ends those whom it was asked to end
            generator.doomed = generator.doomed and generator.uses_device

    @precondition(
        lambda self: (
            self.learner is not None and not (self.learner.is_asking or self.learner.uses_device)
        )
    )
    @rule()
    def learner_asks(self) -> None:
        """Its next batches are there, or it is told to stop and saves, or it goes on after an
        evaluation: all look alike from here.
        """
        assert self.learner is not None
        self.learner.membership.close()
        if self.learner.membership.is_free:
            self.learner.handovers.ask()
            self.learner.is_asking = True

    @precondition(lambda self: self.learner is not None and self.learner.is_asking)
    @rule()
    def learner_tells(self) -> None:
        assert self.learner is not None
        for life in sorted(self.learner.handovers.to_order(self.present)):
            self.letters.append(
                Letter(self.learner.number, life, Kind.SLEEP, self.learner.handovers.number)
            )

    @precondition(lambda self: self.learner is not None and self.learner.is_asking)
    @rule()
    def learner_takes(self) -> None:
        assert self.learner is not None
        if self.learner.handovers.is_clear(self.present):
            self.learner.is_asking = False
            self.learner.uses_device = True

    @precondition(lambda self: self.learner is not None and self.learner.uses_device)
    @rule()
    def learner_gives(self) -> None:
        assert self.learner is not None
        self.learner.version += 1
        self.learner.uses_device = False
        self.learner.membership.follow(self.present)
        self.learner.membership.publish(self.learner.version)

    @precondition(lambda self: self.learner is not None and self.learner.membership.behind())
    @rule()
    def learner_pushes(self) -> None:
        assert self.learner is not None
        self.learner.membership.follow(self.present)
        for life in sorted(self.learner.membership.behind()):
            load = self.learner.membership.begin([life])
            self.letters.append(
                Letter(self.learner.number, life, Kind.WAKE, self.learner.handovers.number, load)
            )

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        """The learner waits no longer; the letter may still arrive before the supervisor has ended
        the generator.
        """
        self._give_up(data.draw(st.sampled_from(self._unanswered())))

    def _unanswered(self) -> list[Letter]:
        return [
            x for x in self.letters if self.learner is not None and x.learner == self.learner.number
        ]

    def _give_up(self, letter: Letter) -> None:
        assert self.learner is not None
        if letter.load is not None:
            self._expel(self.learner.membership.expire(letter.load))
        else:
            self._expel({letter.life})

    def _expel(self, lives: set[Life]) -> None:
        for life in lives & self.present:
            self.generators[life].doomed = True

    @invariant()
    def never_do_both_use_the_device(self) -> None:
        if self.learner is not None and self.learner.uses_device:
            assert not any(generator.uses_device for generator in self.generators.values())

    def teardown(self) -> None:
        """From anywhere: doomed ones are ended, letters arrive, and then the learner gets the
        device and everyone is woken after it.
        """
        for life in [life for life, generator in self.generators.items() if generator.doomed]:
            del self.generators[life]
        self.letters = [letter for letter in self.letters if letter.life in self.generators]
        if self.learner is None:
            self.learner_starts(1)
        learner = self.learner
        assert learner is not None
        self._deliver()
        learner.membership.follow(self.present)
        if not (learner.is_asking or learner.uses_device):
            self.learner_asks()
        if learner.is_asking:
            self.learner_tells()
            self._deliver()
            self.learner_takes()
        assert learner.uses_device
        self.never_do_both_use_the_device()
        self.learner_gives()
        self.learner_pushes()
        self._deliver()
        assert all(generator.uses_device for generator in self.generators.values())

    def _deliver(self) -> None:
        while self.letters:
            self._arrive(self.letters.pop(0))


World.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
test_every_interleaving = World.TestCase
