"""Which generator holds which version, and who loads together: the state machine behind every push.
Pure: no clock, no socket.

An epoch is one attempt of fixed members to load one version together: one member where each loads
for itself (a shared block, a file), several where they share a communicator.  It ends when every
member answered, left, or at the deadline.  It reads the learner's block until `release`: what was
written to a file or sent needs the block no more. Invariants
- Epochs are numbered and never reused; an answer to an epoch that ended, or of a life that is not
  in it, changes nothing.
- Members join and leave between versions only: a joiner gets an epoch of its own, nobody who holds
  the version is asked again.
- Who is silent at the deadline, or failed by itself, is cut off.  Who gave up an epoch that lost a
  member is tried again with the others; who gave up one that lost nobody is tried again alone, and
  cut off if it gives up alone.  So repetitions have fewer members and end.
- The version changes only while no epoch reads the block.  `close()` lets none begin, so a learner
  waits one deadline at most.
Driven by training/pushing.py, which owns the deadline and the calls.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from async_rl.core.errors import WeightsError
from async_rl.core.types import NO_VERSION

Life = tuple[str, int]
"""One life of a generator: its name and its pid."""


class Answer(enum.Enum):
    """What a member says of an epoch.

    GAVE_UP: it is alive, waited for others in vain, and does not serve what it began to load.
    FAILED: what went wrong is its own.
    """

    LOADED = enum.auto()
    GAVE_UP = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, kw_only=True)
class Epoch:
    """One attempt. `members` never change; `missing` are those without an answer that are still
    there.
    """

    number: int
    version: int
    members: frozenset[Life]
    missing: set[Life]
    gave_up: set[Life] = field(default_factory=set)
    has_lost: bool = False
    reads_block: bool = True

    @property
    def is_whole(self) -> bool:
        """All members have loaded the version."""
        return not (self.missing or self.gave_up or self.has_lost)


class WeightGroup:
    """The generators of one learner process."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self._num_epochs = 0
        self._is_closed = True
        self._present: set[Life] = set()
        self._cut_off: set[Life] = set()
        self._alone: set[Life] = set()
        self._holds: dict[Life, int] = {}
        self._open: dict[int, Epoch] = {}

    @property
    def is_free(self) -> bool:
        """Nobody reads the block, so the version may change."""
        return not any(epoch.reads_block for epoch in self._open.values())

    @property
    def loading(self) -> set[int]:
        """The versions that are being loaded."""
        return {epoch.version for epoch in self._open.values()}

    def close(self) -> None:
        """A version is about to come: no epoch begins before it is there."""
        self._is_closed = True

    def publish(self, version: int) -> None:
        """The version that everyone shall hold from now on. Raises WeightsError while somebody
        reads the block.
        """
        if not self.is_free:
            raise WeightsError(
                f"version {version} cannot be published while {len(self._open)} loads of version"
                f" {self.version} are open"
            )
        self.version, self._is_closed = version, False

    def follow(self, present: Collection[Life]) -> set[Life]:
        """Who serves now. Returns lives to be cut off, because an epoch ended when the last of
        those it waited for left.
        """
        present = set(present)
        self._cut_off &= present
        self._alone &= present
        self._present = present - self._cut_off
        self._holds = {
            life: version for life, version in self._holds.items() if life in self._present
        }
        ended: set[Life] = set()
        for epoch in list(self._open.values()):
            if gone := epoch.missing - self._present:
                epoch.missing -= gone
                epoch.has_lost = True
                ended |= self._end_if_complete(epoch)
        return ended

    def behind(self) -> set[Life]:
        """Who should load the version and does not do so yet; nobody while a version is about to
        come.
        """
        if self._is_closed:
            return set()
        loading = {life for epoch in self._open.values() for life in epoch.members}
        return {life for life in self._present - loading if self._holds.get(life) != self.version}

    def next_party(self, together: Collection[Life]) -> set[Life]:
        """Of those that are behind and load together, who shall do so now; nobody while others of
        them still load.
        """
        together = set(together)
        party = (
            set()
            if any(epoch.members & together for epoch in self._open.values())
            else self.behind() & together
        )
        alone = party & self._alone
        return {min(alone)} if alone else party

    def begin(self, members: Collection[Life]) -> Epoch:
        """An epoch of some of those who are behind. Raises WeightsError for anybody else."""
        if not members or (others := set(members) - self.behind()):
            raise WeightsError(
                f"an epoch of {sorted(members)} cannot begin:"
                f" {sorted(others) if members else 'nobody'} is not to load"
            )
        self._num_epochs += 1
        epoch = Epoch(
            number=self._num_epochs,
            version=self.version,
            members=frozenset(members),
            missing=set(members),
        )
        self._open[epoch.number] = epoch
        for life in members:
            self._holds.pop(life, None)  # what it holds is not known until it answers
        return epoch

    def release(self, number: int) -> None:
        """What the members of the epoch still have to read is not in the block."""
        if (epoch := self._open.get(number)) is not None:
            epoch.reads_block = False

    def answer(self, number: int, life: Life, answer: Answer) -> set[Life]:
        """A member of an epoch is done with it. Returns lives to be cut off."""
        epoch = self._open.get(number)
        if epoch is None or life not in epoch.missing:
            return set()
        epoch.missing.discard(life)
        if answer is Answer.LOADED:
            self._holds[life] = epoch.version
            self._alone.discard(life)
        elif answer is Answer.GAVE_UP:
            epoch.gave_up.add(life)
        else:
            epoch.has_lost = True
            return self._cut({life}) | self._end_if_complete(epoch)
        return self._end_if_complete(epoch)

    def expire(self, number: int) -> set[Life]:
        """The deadline of an epoch has passed. Returns lives to be cut off: those that are silent."""
        epoch = self._open.get(number)
        if epoch is None:
            return set()
        silent, epoch.missing = epoch.missing, set()
        epoch.has_lost |= bool(silent)
        return self._cut(silent) | self._end_if_complete(epoch)

    def all_hold(self, version: int) -> bool:
        """At least one generator serves, and all that serve hold `version` or a later one."""
        return bool(self._present) and all(
            self._holds.get(life, NO_VERSION) >= version for life in self._present
        )

    def _end_if_complete(self, epoch: Epoch) -> set[Life]:
        if epoch.missing:
            return set()
        del self._open[epoch.number]
        if epoch.has_lost:
            return set()
        if len(epoch.members) == 1:
            return self._cut(epoch.gave_up & self._present)
        self._alone |= epoch.gave_up & self._present
        return set()

    def _cut(self, lives: set[Life]) -> set[Life]:
        self._cut_off |= lives
        self._present -= lives
        for life in lives:
            self._holds.pop(life, None)
        return lives
