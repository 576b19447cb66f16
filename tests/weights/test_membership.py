"""Facts about who loads which version together, over every interleaving of join, leave, die, hang,
push and a new version.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.core.errors import WeightsError
from async_rl.weights.membership import Answer, Life, Load, Membership

A, B, C = ("a", 1), ("b", 2), ("c", 3)


def fleet_of(*lives: Life, version: int = 1) -> Membership:
    fleet = Membership()
    fleet.follow(lives)
    assert fleet.behind() == set(), "there is no version yet"
    fleet.publish(version)
    return fleet


def test_a_hanging_member_is_cut_off_and_the_survivors_try_again_under_a_new_attempt() -> None:
    fleet = fleet_of(A, B, C)
    first = fleet.begin([A, B, C])
    assert first.number == 1
    fleet.answer(first, A, Answer.GAVE_UP)
    fleet.answer(first, B, Answer.GAVE_UP)
    assert fleet.expire(first) == {C}
    second = fleet.begin(fleet.behind())
    assert second.members == {A, B}
    assert second.number > first.number
    fleet.answer(second, A, Answer.LOADED)
    fleet.answer(second, B, Answer.LOADED)
    assert fleet.all_have(1)


def test_a_member_that_times_out_among_healthy_ones_retries_alone_and_is_removed_if_it_fails() -> (
    None
):
    fleet = fleet_of(A, B, C)
    load = fleet.begin([A, B, C])
    fleet.answer(load, C, Answer.LOADED)
    for life in (A, B):
        assert fleet.answer(load, life, Answer.GAVE_UP) == set()
    first = fleet.begin(fleet.next_together([A, B, C]))
    assert first.members == {A}
    assert fleet.answer(first, A, Answer.GAVE_UP) == {A}
    second = fleet.begin(fleet.next_together([A, B, C]))
    assert second.members == {B}
    assert fleet.answer(second, B, Answer.LOADED) == set()
    assert fleet.behind() == set()
    assert fleet.all_have(1)


def test_members_that_gave_up_because_the_sender_was_late_retry_together_and_none_is_cut_off() -> (
    None
):
    """A broadcast to all, then to one alone; each answer is there before the sender notices."""
    fleet = fleet_of(A, B, C)
    for lives in ([A, B, C], [A]):
        load = fleet.begin(fleet.next_together(lives), awaits_sender=True)
        for life in lives:
            assert fleet.answer(load, life, Answer.GAVE_UP) == set()
        assert fleet.next_together(lives) == set(), "the sender still sends"
        assert not fleet.is_free
        assert fleet.sent(load, is_late=True) == set()
        assert fleet.is_free
        assert fleet.next_together(lives) == set(lives)


def test_a_member_that_gives_up_alone_on_a_punctual_sender_is_cut_off() -> None:
    fleet = fleet_of(A)
    load = fleet.begin([A], awaits_sender=True)
    assert fleet.answer(load, A, Answer.GAVE_UP) == set()
    assert fleet.sent(load, is_late=False) == {A}


def test_who_failed_by_itself_is_cut_off_and_those_who_gave_up_with_it_try_again_together() -> None:
    fleet = fleet_of(A, B, C)
    load = fleet.begin([A, B, C])
    assert fleet.answer(load, C, Answer.FAILED) == {C}
    for life in (A, B):
        assert fleet.answer(load, life, Answer.GAVE_UP) == set()
    assert not load.is_whole
    assert fleet.next_together([A, B, C]) == {A, B}


def test_a_life_that_has_the_number_of_an_earlier_process_starts_anew() -> None:
    """Linux uses the numbers of processes again."""
    fleet = fleet_of(A, B)
    load = fleet.begin([A, B])
    assert fleet.answer(load, A, Answer.FAILED) == {A}
    for present in ([B], [A, B]):
        fleet.follow(present)
    fleet.expire(load)
    assert fleet.behind() == {A}
    fleet = fleet_of(A, B)
    load = fleet.begin([A, B])
    fleet.answer(load, B, Answer.LOADED)
    fleet.answer(load, A, Answer.GAVE_UP)
    for present in ([B], [A, B, C]):
        fleet.follow(present)
    assert fleet.next_together([A, B, C]) == {A, C}, "it does not retry alone"


def test_a_joiner_loads_alone() -> None:
    fleet = fleet_of(A)
    fleet.answer(fleet.begin([A]), A, Answer.LOADED)
    fleet.follow([A, B])
    assert fleet.behind() == {B}
    fleet.close()
    assert fleet.behind() == set()


def test_what_a_member_has_is_not_known_while_it_loads() -> None:
    fleet = fleet_of(A)
    fleet.answer(fleet.begin([A]), A, Answer.LOADED)
    assert fleet.all_have(1)
    fleet.publish(2)
    fleet.begin([A])
    assert not fleet.all_have(1)


def test_no_version_is_published_while_somebody_loads() -> None:
    fleet = fleet_of(A)
    fleet.begin([A])
    with pytest.raises(
        WeightsError, match="version 2 cannot be published while 1 loads of version 1 are open"
    ):
        fleet.publish(2)


def test_no_joint_load_begins_beside_another_and_one_who_loads_for_itself_is_in_none() -> None:
    fleet = fleet_of(A, B, C)
    assert fleet.next_together([A, B]) == {A, B}
    load = fleet.begin([A])
    assert fleet.next_together([A, B]) == set()
    fleet.answer(load, A, Answer.LOADED)
    fleet.begin([C])
    assert fleet.next_together([A, B]) == {B}


def test_a_version_may_come_while_somebody_loads_what_the_block_is_not_needed_for() -> None:
    fleet = fleet_of(A, B)
    first, second = fleet.begin([A]), fleet.begin([B])
    first.reads_block = False
    assert not fleet.is_free
    assert fleet.loading == {1}
    fleet.answer(second, B, Answer.LOADED)
    assert fleet.is_free
    fleet.publish(2)
    assert fleet.behind() == {B}
    fleet.answer(first, A, Answer.LOADED)
    assert fleet.behind() == {A, B}


class Fleet(RuleBasedStateMachine):
    """Generators that load, give up, hang, die, leave and join around a learner that publishes;
    `block` is what readers would read.
    """

    @initialize()
    def start(self) -> None:
        self.fleet = Membership()
        self.block = 0
        self.fleet.publish(0)
        self.num_lives = 0
        self.present: set[Life] = set()  # as the directory shows it
        self.expelled: set[Life] = set()
        self.serves: dict[Life, int] = {}
        self.loading: dict[int, tuple[Load, frozenset[Life]]] = {}
        self.copied: dict[int, int] = {}  # load -> what its members read instead of the block
        self.ended: list[tuple[Load, Life]] = []
        self.wants_version = False
        self.opened_since_wanted = 0

    def _expel(self, lives: set[Life]) -> None:
        assert not lives & self.expelled, "nobody is cut off twice"
        self.expelled |= lives
        for life in lives:
            self.serves.pop(life, None)

    def _forget_ended(self) -> None:
        self.loading = {
            n: (e, m) for n, (e, m) in self.loading.items() if e.missing or e.awaits_sender
        }

    def _unanswered(self) -> list[int]:
        return sorted(n for n, (load, _) in self.loading.items() if load.missing)

    def _sending(self) -> list[int]:
        return sorted(n for n, (load, _) in self.loading.items() if load.awaits_sender)

    @rule()
    def join(self) -> None:
        self.num_lives += 1
        self.present.add((f"g{self.num_lives % 3}", self.num_lives))
        self.fleet.follow(self.present)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave_or_die(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(sorted(self.present)))
        self.present.discard(life)
        self.expelled.discard(life)
        self.serves.pop(life, None)
        self.fleet.follow(self.present)
        self._forget_ended()

    @precondition(lambda self: self.fleet.behind())
    @rule(data=st.data(), is_party=st.booleans())
    def begin(self, data: st.DataObject, is_party: bool) -> None:
        behind = self.fleet.behind()
        members = (
            self.fleet.next_together(self.present)
            if is_party
            else data.draw(st.sets(st.sampled_from(sorted(behind)), min_size=1))
        )
        if not members:
            assert self.loading, "a party waits only while others load"
            return
        assert members <= behind
        load = self.fleet.begin(members, awaits_sender=is_party)
        assert load.number not in self.loading
        self.loading[load.number] = load, frozenset(members)
        self.opened_since_wanted += self.wants_version
        for life in members:
            self.serves.pop(
                life, None
            )  # the worst case: loading in place, so nothing is served meanwhile

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data(), answer=st.sampled_from(Answer))
    def answer(self, data: st.DataObject, answer: Answer) -> None:
        load, _ = self.loading[data.draw(st.sampled_from(self._unanswered()))]
        life = data.draw(st.sampled_from(sorted(load.missing)))
        if answer is Answer.LOADED:
            self.serves[life] = self.copied.get(
                load.number, self.block
            )  # what was there when the last byte was read
            assert load.version == self.serves[life], "the block changed under a reader"
        self.ended.append((load, life))
        self._expel(self.fleet.answer(load, life, answer))
        self._forget_ended()

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.loading)))
        self.copied.setdefault(number, self.block)
        self.loading[number][0].reads_block = False

    @precondition(lambda self: self._sending())
    @rule(data=st.data(), is_late=st.booleans())
    def send(self, data: st.DataObject, is_late: bool) -> None:
        number = data.draw(st.sampled_from(self._sending()))
        self.copied.setdefault(number, self.block)
        cut = self.fleet.sent(self.loading[number][0], is_late=is_late)
        assert not (is_late and cut)
        self._expel(cut)
        self._forget_ended()

    @precondition(lambda self: set(self._unanswered()) - set(self._sending()))
    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        numbers = sorted(set(self._unanswered()) - set(self._sending()))
        load, _ = self.loading[data.draw(st.sampled_from(numbers))]
        self.ended.extend((load, life) for life in load.missing)
        silent = set(load.missing)
        cut = self.fleet.expire(load)
        assert silent <= cut
        self._expel(cut)
        self._forget_ended()

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), answer=st.sampled_from(Answer))
    def stale_answer(self, data: st.DataObject, answer: Answer) -> None:
        load, life = data.draw(st.sampled_from(self.ended))
        behind, free = self.fleet.behind(), self.fleet.is_free
        assert self.fleet.answer(load, life, answer) == set()
        assert (self.fleet.behind(), self.fleet.is_free) == (behind, free)

    @rule()
    def want_version(self) -> None:
        self.fleet.close()
        self.wants_version, self.opened_since_wanted = True, 0

    @precondition(lambda self: self.wants_version and self.fleet.is_free)
    @rule()
    def publish(self) -> None:
        self.block += 1
        self.fleet.publish(self.block)
        self.wants_version = False

    @invariant()
    def members_of_a_load_are_fixed(self) -> None:
        assert all(load.members == members for load, members in self.loading.values())

    @invariant()
    def nobody_who_loads_is_believed_to_hold_a_version(self) -> None:
        held = {
            life
            for life in self.present - self.expelled
            if self.fleet._loaded.get(life) is not None
        }
        assert held == self.serves.keys()
        assert all(self.fleet._loaded[life] == version for life, version in self.serves.items())

    @invariant()
    def the_learner_waits_for_loads_that_had_begun_only(self) -> None:
        assert self.opened_since_wanted == 0
        assert self.fleet.is_free == (self.loading.keys() <= self.copied.keys())

    def teardown(self) -> None:
        """From anywhere: the open loads end by their deadlines, and then whoever is left reaches
        the newest version.
        """
        for number in self._sending():
            self._expel(self.fleet.sent(self.loading[number][0], is_late=False))
        for number in list(self.loading):
            self._expel(self.fleet.expire(self.loading[number][0]))
        assert self.fleet.is_free
        self.block += 1
        self.fleet.publish(self.block)
        while behind := self.fleet.behind():
            load = self.fleet.begin(behind)
            for life in behind:
                self._expel(self.fleet.answer(load, life, Answer.LOADED))
        survivors = self.present - self.expelled
        assert self.fleet.all_have(self.block) == bool(survivors)


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_every_interleaving = Fleet.TestCase
