"""Facts about who loads which version together, over every interleaving of join, leave, die, hang,
push and a new version.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.core.errors import WeightsError
from async_rl.weights.membership import Answer, Epoch, Life, WeightGroup

A, B, C = ("a", 1), ("b", 2), ("c", 3)


def group_of(*lives: Life, version: int = 1) -> WeightGroup:
    group = WeightGroup()
    group.follow(lives)
    group.publish(version)
    return group


def test_a_hanging_member_is_cut_off_and_the_survivors_try_again_under_a_new_epoch() -> None:
    group = group_of(A, B, C)
    first = group.begin([A, B, C])
    group.answer(first.number, A, Answer.GAVE_UP)
    group.answer(first.number, B, Answer.GAVE_UP)
    assert group.expire(first.number) == {C}
    second = group.begin(group.behind())
    assert second.members == {A, B}
    assert second.number > first.number
    group.answer(second.number, A, Answer.LOADED)
    group.answer(second.number, B, Answer.LOADED)
    assert group.all_hold(1)


def test_a_member_that_dies_lets_the_survivors_try_again() -> None:
    group = group_of(A, B)
    first = group.begin([A, B])
    group.answer(first.number, A, Answer.GAVE_UP)
    assert group.follow([A]) == set()
    assert group.behind() == {A}


def test_a_member_that_times_out_among_healthy_ones_retries_alone_and_is_removed_if_it_fails() -> (
    None
):
    group = group_of(A, B, C)
    epoch = group.begin([A, B, C])
    group.answer(epoch.number, C, Answer.LOADED)
    for life in (A, B):
        assert group.answer(epoch.number, life, Answer.GAVE_UP) == set()
    first = group.begin(group.next_party([A, B, C]))
    assert first.members == {A}
    assert group.answer(first.number, A, Answer.GAVE_UP) == {A}
    second = group.begin(group.next_party([A, B, C]))
    assert second.members == {B}
    assert group.answer(second.number, B, Answer.LOADED) == set()
    assert group.behind() == set()
    assert group.all_hold(1)


def test_who_failed_by_itself_is_cut_off_and_those_who_gave_up_with_it_try_again_together() -> None:
    group = group_of(A, B, C)
    epoch = group.begin([A, B, C])
    assert group.answer(epoch.number, C, Answer.FAILED) == {C}
    for life in (A, B):
        assert group.answer(epoch.number, life, Answer.GAVE_UP) == set()
    assert not epoch.is_whole
    assert group.next_party([A, B, C]) == {A, B}


def test_no_party_begins_beside_another_and_one_who_loads_for_itself_is_in_none() -> None:
    group = group_of(A, B, C)
    assert group.next_party([A, B]) == {A, B}
    epoch = group.begin([A])
    assert group.next_party([A, B]) == set()
    group.answer(epoch.number, A, Answer.LOADED)
    group.begin([C])
    assert group.next_party([A, B]) == {B}


def test_a_version_may_come_while_somebody_loads_what_the_block_is_not_needed_for() -> None:
    group = group_of(A, B)
    first, second = group.begin([A]), group.begin([B])
    group.release(first.number)
    assert not group.is_free
    assert group.loading == {1}
    group.answer(second.number, B, Answer.LOADED)
    assert group.is_free
    group.publish(2)
    assert group.behind() == {B}
    group.answer(first.number, A, Answer.LOADED)
    assert group.behind() == {A, B}


def test_an_answer_to_an_epoch_that_ended_is_ignored() -> None:
    group = group_of(A)
    epoch = group.begin([A])
    assert group.expire(epoch.number) == {A}
    assert group.answer(epoch.number, A, Answer.LOADED) == set()
    assert not group.all_hold(1)


def test_a_joiner_loads_alone() -> None:
    group = group_of(A)
    group.answer(group.begin([A]).number, A, Answer.LOADED)
    group.follow([A, B])
    assert group.behind() == {B}
    with pytest.raises(WeightsError, match="is not to load"):
        group.begin([A, B])


def test_another_life_of_the_same_name_holds_nothing() -> None:
    group = group_of(A)
    group.answer(group.begin([A]).number, A, Answer.LOADED)
    group.follow([("a", 9)])
    assert group.behind() == {("a", 9)}


def test_no_version_is_published_while_somebody_loads() -> None:
    group = group_of(A)
    group.begin([A])
    with pytest.raises(
        WeightsError, match="version 2 cannot be published while 1 loads of version 1 are open"
    ):
        group.publish(2)


class Fleet(RuleBasedStateMachine):
    """Generators that load, give up, hang, die, leave and join around a learner that publishes;
    `block` is what readers would read.
    """

    @initialize()
    def start(self) -> None:
        self.group = WeightGroup()
        self.block = 0
        self.group.publish(0)
        self.num_lives = 0
        self.present: set[Life] = set()  # as the directory shows it
        self.expelled: set[Life] = set()
        self.serves: dict[Life, int] = {}
        self.loading: dict[int, tuple[Epoch, frozenset[Life]]] = {}
        self.copied: dict[int, int] = {}  # epoch -> what its members read instead of the block
        self.ended: list[tuple[Epoch, Life]] = []
        self.wants_version = False
        self.opened_since_wanted = 0

    def _expel(self, lives: set[Life]) -> None:
        assert not lives & self.expelled, "nobody is cut off twice"
        self.expelled |= lives
        for life in lives:
            self.serves.pop(life, None)

    def _forget_ended(self) -> None:
        self.loading = {n: (e, m) for n, (e, m) in self.loading.items() if e.missing}

    @rule()
    def join(self) -> None:
        self.num_lives += 1
        self.present.add((f"g{self.num_lives % 3}", self.num_lives))
        self._expel(self.group.follow(self.present))

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave_or_die(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(sorted(self.present)))
        self.present.discard(life)
        self.expelled.discard(life)
        self.serves.pop(life, None)
        self._expel(self.group.follow(self.present))
        self._forget_ended()

    @precondition(lambda self: self.group.behind())
    @rule(data=st.data(), is_party=st.booleans())
    def begin(self, data: st.DataObject, is_party: bool) -> None:
        behind = self.group.behind()
        members = (
            self.group.next_party(self.present)
            if is_party
            else data.draw(st.sets(st.sampled_from(sorted(behind)), min_size=1))
        )
        if not members:
            assert self.loading, "a party waits only while others load"
            return
        assert members <= behind
        epoch = self.group.begin(members)
        assert epoch.number not in self.loading
        self.loading[epoch.number] = epoch, frozenset(members)
        self.opened_since_wanted += self.wants_version
        for life in members:
            self.serves.pop(
                life, None
            )  # the worst case: loading in place, so nothing is served meanwhile

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), answer=st.sampled_from(Answer))
    def answer(self, data: st.DataObject, answer: Answer) -> None:
        epoch, _ = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        life = data.draw(st.sampled_from(sorted(epoch.missing)))
        if answer is Answer.LOADED:
            self.serves[life] = self.copied.get(
                epoch.number, self.block
            )  # what was there when the last byte was read
            assert epoch.version == self.serves[life], "the block changed under a reader"
        self.ended.append((epoch, life))
        self._expel(self.group.answer(epoch.number, life, answer))
        self._forget_ended()

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.loading)))
        self.copied.setdefault(number, self.block)
        self.group.release(number)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        epoch, _ = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        self.ended.extend((epoch, life) for life in epoch.missing)
        silent = set(epoch.missing)
        cut = self.group.expire(epoch.number)
        assert silent <= cut
        self._expel(cut)
        self._forget_ended()

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), answer=st.sampled_from(Answer))
    def stale_answer(self, data: st.DataObject, answer: Answer) -> None:
        epoch, life = data.draw(st.sampled_from(self.ended))
        behind, free = self.group.behind(), self.group.is_free
        assert self.group.answer(epoch.number, life, answer) == set()
        assert (self.group.behind(), self.group.is_free) == (behind, free)

    @rule()
    def want_version(self) -> None:
        self.group.close()
        self.wants_version, self.opened_since_wanted = True, 0

    @precondition(lambda self: self.wants_version and self.group.is_free)
    @rule()
    def publish(self) -> None:
        self.block += 1
        self.group.publish(self.block)
        self.wants_version = False

    @invariant()
    def members_of_an_epoch_are_fixed(self) -> None:
        assert all(epoch.members == members for epoch, members in self.loading.values())

    @invariant()
    def nobody_who_loads_is_believed_to_hold_a_version(self) -> None:
        held = {
            life for life in self.present - self.expelled if self.group._holds.get(life) is not None
        }
        assert held == self.serves.keys()
        assert all(self.group._holds[life] == version for life, version in self.serves.items())

    @invariant()
    def the_learner_waits_for_loads_that_had_begun_only(self) -> None:
        assert self.opened_since_wanted == 0
        assert self.group.is_free == (self.loading.keys() <= self.copied.keys())

    def teardown(self) -> None:
        """From anywhere: the open loads end by their deadlines, and then whoever is left reaches
        the newest version.
        """
        for number in list(self.loading):
            self._expel(self.group.expire(number))
        assert self.group.is_free
        self.block += 1
        self.group.publish(self.block)
        while behind := self.group.behind():
            epoch = self.group.begin(behind)
            for life in behind:
                self._expel(self.group.answer(epoch.number, life, Answer.LOADED))
        survivors = self.present - self.expelled
        assert self.group.all_hold(self.block) == bool(survivors)


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_every_interleaving = Fleet.TestCase
