"""Facts about who loads which version together, over every interleaving of join, leave, die, hang,
push and a new version; and whose handover a shared device is.
"""

import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from async_rl.core.errors import WeightsError
from async_rl.weights.handovers import Handovers, Orders
from async_rl.weights.membership import Answer, Life, Load, Membership

A, B, C = ("a", 1), ("b", 2), ("c", 3)
ALL = {A, B, C}
LOADED, GAVE_UP, FAILED = Answer


@pytest.mark.parametrize(
    ("answers", "cut_off", "tries_next"),
    [
        # Silent at the deadline, or failed by itself: the others try again together.
        ({A: GAVE_UP, B: GAVE_UP}, {C}, {A, B}),
        ({C: FAILED, A: GAVE_UP, B: GAVE_UP}, {C}, {A, B}),
        # Nobody was lost: who gave up retries alone.
        ({C: LOADED, A: GAVE_UP, B: GAVE_UP}, set(), {A}),
        ({A: LOADED, B: LOADED, C: LOADED}, set(), set()),
        ({A: GAVE_UP}, {A}, set()),
    ],
)
def test_a_lost_member_is_cut_off_and_those_who_gave_up_with_it_try_again(
    answers: dict[Life, Answer], cut_off: set[Life], tries_next: set[Life]
) -> None:
    members = ALL if len(answers) > 1 else set(answers)
    fleet = Membership()
    fleet.follow(members)
    assert fleet.behind() == set(), "there is no version yet"
    fleet.publish(1)
    load = fleet.begin(members)
    cut: set[Life] = set()
    for life, answer in answers.items():
        cut |= fleet.answer(load, life, answer)
    assert cut | fleet.expire(load) == cut_off
    assert fleet.next_together(members) == tries_next


class Fleet:
    """Generators that load, give up, hang, die, leave and join around a learner that publishes;
    `block` is what readers would read.
    """

    def __init__(self, drawn: random.Random) -> None:
        self.drawn = drawn
        self.fleet = Membership()
        self.block = 0
        self.fleet.publish(0)
        self.present: set[Life] = set()  # as the directory shows it
        self.expelled: set[Life] = set()
        self.serves: dict[Life, int] = {}
        self.loads: list[Load] = []
        self.copied: dict[int, int] = {}  # load -> what its members read instead of the block
        self.ended: list[tuple[Load, Life]] = []
        self.wants_version = False

    def expel(self, lives: set[Life]) -> None:
        assert not lives & self.expelled, "nobody is cut off twice"
        self.expelled |= lives
        for life in lives:
            self.serves.pop(life, None)

    def open_loads(self) -> list[Load]:
        return [load for load in self.loads if load.missing or load.awaits_sender]

    def events(self, number: int) -> Iterator[Callable[[], None]]:
        choose = self.drawn.choice
        yield lambda: self.follow({*self.present, (f"g{number % 3}", number)})
        if self.present:
            yield lambda: self.follow(self.present - {choose(sorted(self.present))})
        if self.fleet.behind():
            yield self.begin
            yield self.begin
        if self.ended:
            yield lambda: self.stale_answer(*choose(self.ended))
        if self.wants_version and self.fleet.is_free:
            yield self.publish
        yield self.want_version
        for load in self.open_loads():
            yield lambda load=load: self.release(load)
            if load.missing:
                yield lambda load=load: self.answer(load, choose(sorted(load.missing)))
            if load.awaits_sender:
                yield lambda load=load: self.send(load, is_late=choose((True, False)))
            elif load.missing:
                yield lambda load=load: self.expire(load)

    def follow(self, present: set[Life]) -> None:
        gone = self.present - present
        self.present = present
        self.expelled -= gone
        self.serves = {life: version for life, version in self.serves.items() if life not in gone}
        self.fleet.follow(present)

    def begin(self) -> None:
        assert not self.wants_version, "no load starts before the next version"
        behind = sorted(self.fleet.behind())
        is_party = self.drawn.random() < 0.5
        members = self.fleet.next_together(self.present)
        assert members <= set(behind)
        assert members or self.open_loads(), "a party waits only while others load"
        if not is_party:
            members = set(self.drawn.sample(behind, self.drawn.randint(1, len(behind))))
        if members:
            self.loads.append(self.fleet.begin(members, awaits_sender=is_party))
        for life in members:
            # The worst case: loading in place, so nothing is served meanwhile.
            self.serves.pop(life, None)

    def answer(self, load: Load, life: Life) -> None:
        answer = self.drawn.choice(list(Answer))
        if answer is LOADED:
            # What was there when the last byte was read.
            self.serves[life] = self.copied.get(load.number, self.block)
            assert load.version == self.serves[life], "the block changed under a reader"
        self.ended.append((load, life))
        self.expel(self.fleet.answer(load, life, answer))

    def release(self, load: Load) -> None:
        self.copied.setdefault(load.number, self.block)
        load.reads_block = False

    def send(self, load: Load, *, is_late: bool) -> None:
        self.copied.setdefault(load.number, self.block)
        cut = self.fleet.sent(load, is_late=is_late)
        assert not (is_late and cut)
        self.expel(cut)

    def expire(self, load: Load) -> None:
        silent = set(load.missing)
        self.ended.extend((load, life) for life in sorted(silent))
        cut = self.fleet.expire(load)
        assert silent <= cut
        self.expel(cut)

    def stale_answer(self, load: Load, life: Life) -> None:
        behind, free = self.fleet.behind(), self.fleet.is_free
        assert self.fleet.answer(load, life, self.drawn.choice(list(Answer))) == set()
        assert (self.fleet.behind(), self.fleet.is_free) == (behind, free)

    def want_version(self) -> None:
        self.fleet.close()
        self.wants_version = True

    def publish(self) -> None:
        self.block += 1
        self.fleet.publish(self.block)
        self.wants_version = False

    def check(self) -> None:
        alive = self.present - self.expelled
        for version in (self.block - 1, self.block):
            have = [self.serves.get(life, -1) >= version for life in alive]
            assert self.fleet.all_have(version) == (bool(alive) and all(have))
        now = self.open_loads()
        assert self.fleet.is_free == all(load.number in self.copied for load in now)
        assert self.fleet.loading == {load.version for load in now}


@pytest.mark.parametrize("seed", range(40))
def test_a_fleet_keeps_its_rules_in_any_interleaving(seed: int) -> None:
    world = Fleet(random.Random(seed))
    for number in range(80):
        world.drawn.choice(list(world.events(number)))()
        world.check()
    # The open loads end by their deadlines, and then whoever is left reaches the newest version.
    for load in world.open_loads():
        if load.awaits_sender:
            world.send(load, is_late=False)
        world.expire(load)
    world.publish()
    while behind := world.fleet.behind():
        load = world.fleet.begin(behind)
        for life in behind:
            assert world.fleet.answer(load, life, LOADED) == set()
    assert world.fleet.all_have(world.block) == bool(world.present - world.expelled)


@pytest.mark.parametrize("seed", range(40))
def test_learner_and_generators_never_use_the_device_together(seed: int) -> None:
    """Generators come and die, the learner dies in any phase or waits no longer for an answer,
    letters arrive late and in any order, to whoever still lives, and answers are lost.
    """
    drawn = random.Random(seed)
    orders: dict[Life, Orders] = {}
    using: set[Life] = set()
    letters: list[tuple[int, Life, bool]] = []  # handover, receiver, and whether it wakes
    learner, uses_device, asks = Handovers(0), False, False
    num_steps = 0

    def arrive(handover: int, life: Life, wakes: bool) -> None:
        try:
            orders[life].accept(handover)
        except WeightsError:
            assert handover < learner.number, "the present order is always obeyed"
            return
        using.discard(life)
        if wakes:
            using.add(life)
        elif handover == learner.number and drawn.random() < 0.9:
            learner.sleeps(life)

    def send(lives: Iterable[Life], *, wakes: bool) -> None:
        letters.extend((learner.number, life, wakes) for life in sorted(lives))

    for number in range(600):
        match drawn.randrange(8):
            case 0 if len(orders) < 3:
                orders[f"g{number}", number] = Orders()
            case 1 if orders and drawn.random() < 0.15:
                lost = drawn.choice(sorted(orders))
                del orders[lost]
                using.discard(lost)
                letters = [letter for letter in letters if letter[1] != lost]
            case 2 | 3 if letters:
                arrive(*letters.pop(drawn.randrange(len(letters))))
            case 4 if drawn.random() < 0.2:
                # The next life starts above all numbers of this one.
                learner, uses_device, asks = Handovers(learner.number + 10), False, True
                learner.ask()
            case 5 if not (asks or uses_device):
                learner.ask()
                asks = True
            case 6 if asks:
                send(learner.to_order(orders), wakes=False)
                uses_device = learner.is_clear(orders)
                asks = not uses_device
                num_steps += uses_device
            case 7 if uses_device:
                uses_device = False
                send(orders, wakes=True)
        assert not (uses_device and using)
    assert num_steps > 1
