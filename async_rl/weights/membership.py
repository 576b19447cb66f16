"""Decide which generators load which version together: the state machine behind every push.

Pure: no clock, no socket. `training/pushing.py` makes the calls and owns the deadline.

A load is one try of fixed members to load one version: a single member where each reads the
weights for itself (a shared block, a file), several where they receive one broadcast. It is over
when every member has answered or left, or at the deadline; a broadcast not before the learner has
sent it or given up. A load reads the learner's block until the caller clears `reads_block`, or
`sent`: once a version is written to a file or sent, its members no longer need the block.

Invariants
- An answer to a load that is over, or from a life that is not in it, changes nothing.
- Members join and leave between versions only: a joiner loads alone, and a generator that already
  has the version does not load it again.
- A member that is silent at the deadline, or that failed for its own reason, is cut off. Members
  that gave up a load that lost a member retry together. A member that gave up a load that lost no
  member retries alone, and is cut off if that fails too. So each retry has fewer members, and
  retries are bounded.
- A sender that was late is the lost member: those that gave up because of it retry together, and
  none is cut off. The sender then has more time (weights/broadcast.py).
- The version changes only while no load reads the block. After `close()` no load starts, so the
  learner waits for one deadline at most, after the senders have written.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from async_rl.core.errors import WeightsError
from async_rl.core.types import NO_VERSION
from async_rl.protocol.supervisor import Member

Life = tuple[str, int]
"""One life of a generator: its name and its pid."""


def life_of(member: Member) -> Life:
    """Return the life that the member list names."""
    return member.name, member.pid


class Answer(enum.Enum):
    """The result that a member reports.

    GAVE_UP: the member is healthy, but another member did not come or was lost. It discards the
    part that it received.
    FAILED: the cause is in the member itself.
    """

    LOADED = enum.auto()
    GAVE_UP = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """One try to load a version. `members` never change; `missing` have not answered or left.

    reads_block: until its members no longer need the learner's block, which the caller notes.
    awaits_sender: a broadcast that the learner still sends.
    """

    number: int
    version: int
    members: frozenset[Life]
    missing: set[Life]
    gave_up: set[Life] = field(default_factory=set)
    has_lost: bool = False
    reads_block: bool = True
    awaits_sender: bool = False

    @property
    def is_broken(self) -> bool:
        """A member was lost or gave up, so no other member can complete a broadcast."""
        return self.has_lost or bool(self.gave_up)

    @property
    def is_whole(self) -> bool:
        """All members have loaded the version."""
        return not (self.missing or self.is_broken)


class Membership:
    """The generators of one learner process and the versions that they have loaded."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self._num_loads = 0
        self._is_closed = True
        self._present: set[Life] = set()
        self._cut_off: set[Life] = set()
        self._retries_alone: set[Life] = set()
        self._loaded: dict[Life, int] = {}
        self._loads: set[Load] = set()
        # Without this index, the loads of a fleet that loads separately would each be compared with
        # all other loads.
        self._is_in: dict[Life, Load] = {}

    @property
    def is_free(self) -> bool:
        """No load reads the block, so the version may change."""
        return not any(load.reads_block for load in self._loads)

    @property
    def loading(self) -> set[int]:
        """The versions that are being loaded; empty if no load is open."""
        return {load.version for load in self._loads}

    def close(self) -> None:
        """Let no load start until the next version is published."""
        self._is_closed = True

    def publish(self, version: int) -> None:
        """Make `version` the one to load. Raises WeightsError while a load reads the block."""
        if not self.is_free:
            raise WeightsError(
                f"version {version} cannot be published while {len(self._loads)} loads of version"
                f" {self.version} are open"
            )
        self.version = version
        self._is_closed = False

    def follow(self, present: Collection[Life]) -> None:
        """Take over the list of lives that serve now."""
        present = set(present)
        self._cut_off &= present
        self._retries_alone &= present
        # The supervisor needs a moment to end a life that was cut off.
        self._present = present - self._cut_off
        self._loaded = {
            life: version for life, version in self._loaded.items() if life in self._present
        }
        for load in list(self._loads):
            gone = load.missing - self._present
            if gone:
                load.missing -= gone
                load.has_lost = True
                # Nobody is cut off: a load that lost a member is retried.
                self._end_if_complete(load)

    def behind(self) -> set[Life]:
        """Lives that should start to load the version; none after `close`."""
        if self._is_closed:
            return set()
        idle = self._present - self._is_in.keys()
        return {life for life in idle if self._loaded.get(life) != self.version}

    def next_together(self, together: Collection[Life]) -> set[Life]:
        """Return the lives of `together` that should start one load now.

        None while any of `together` still loads. A life that has to retry alone goes first.
        """
        if not self._is_in.keys().isdisjoint(together):
            return set()
        members = self.behind().intersection(together)
        alone = members & self._retries_alone
        # One at a time: if two retried together, a failure would not show which one caused it.
        return {min(alone)} if alone else members

    def begin(self, members: Collection[Life], *, awaits_sender: bool = False) -> Load:
        """Start a load of lives that are behind, as `behind` or `next_together` returned them."""
        # Never reused: a late answer must not count for another load.
        self._num_loads += 1
        load = Load(
            number=self._num_loads,
            version=self.version,
            members=frozenset(members),
            missing=set(members),
            awaits_sender=awaits_sender,
        )
        self._loads.add(load)
        for life in members:
            self._is_in[life] = load
            # Unknown until it answers: a load that breaks may leave either version.
            self._loaded.pop(life, None)
        return load

    def sent(self, load: Load, *, is_late: bool) -> set[Life]:
        """Note that the learner has sent a broadcast or given up. Returns lives to cut off.

        is_late: the learner was slower than the members wait.
        """
        load.reads_block = load.awaits_sender = False
        load.has_lost |= is_late
        return self._end_if_complete(load)

    def answer(self, load: Load, life: Life, answer: Answer) -> set[Life]:
        """Record the result of one member. Returns lives to cut off."""
        # A late answer: the load is over, or the process has been replaced.
        if life not in load.missing:
            return set()
        load.missing.discard(life)
        # Removed here immediately; the caller has the supervisor end their processes.
        cut_off: set[Life] = set()
        match answer:
            case Answer.LOADED:
                self._loaded[life] = load.version
                self._retries_alone.discard(life)
            case Answer.GAVE_UP:
                load.gave_up.add(life)
            case Answer.FAILED:
                load.has_lost = True
                cut_off = self._cut({life})
        return cut_off | self._end_if_complete(load)

    def expire(self, load: Load) -> set[Life]:
        """End a load at its deadline. Returns lives to cut off: those without an answer."""
        silent = load.missing
        load.missing = set()
        load.has_lost |= bool(silent)
        return self._cut(silent) | self._end_if_complete(load)

    def all_have(self, version: int) -> bool:
        """At least one generator serves, and all that serve have `version` or a later one."""
        return bool(self._present) and all(
            self._loaded.get(life, NO_VERSION) >= version for life in self._present
        )

    def _end_if_complete(self, load: Load) -> set[Life]:
        if load.missing or load.awaits_sender or load not in self._loads:
            return set()
        self._loads.remove(load)
        for life in load.members:
            del self._is_in[life]
        if load.has_lost:
            return set()
        gave_up = load.gave_up & self._present
        # Alone it waited only for the learner, so the fault is its own.
        if len(load.members) == 1:
            return self._cut(gave_up)
        self._retries_alone |= gave_up
        return set()

    def _cut(self, lives: set[Life]) -> set[Life]:
        self._cut_off |= lives
        self._present -= lives
        for life in lives:
            self._loaded.pop(life, None)
        return lives
