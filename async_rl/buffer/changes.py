"""The changes of the buffer's state, as values: `BufferState` decides them, the store records them.

Each change is recorded in one transaction, in the order of the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from async_rl.buffer.groups import OpenGroup
from async_rl.core.frozen import frozen
from async_rl.core.heads import Summary
from async_rl.core.types import Group, Prompt


@frozen
class Leaver:
    """A prompt that leaves: its index among the training prompts, its id and its mean reward."""

    index: int
    prompt_id: str
    score: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all changes."""


class Admitted(Change):
    """A new group, in the state that it has. num_samples: trajectories of a complete group."""

    group: OpenGroup
    # People read the text of a prompt in the ledger after the data file has changed.
    prompt: Prompt
    num_samples: int


class HandedOut(Change):
    """A generator received the ticket of a group that had waited."""

    group: OpenGroup


class Returned(Change):
    """An attempt has no result; the group waits for its next attempt."""

    group_id: int
    reason: str
    message: str


class Dropped(Change):
    """The group will not be trained; its trajectories, if any, are deleted."""

    group_id: int
    reason: str
    message: str


class Completed(Change):
    """All samples of the group arrived."""

    group: Group
    summary: Summary


class LifeBegan(Change):
    """A life of the learner started at `version`."""

    life: int
    incarnation: str
    version: int


class Leased(Change):
    """These groups are the batch for `train_version`."""

    train_version: int
    group_ids: Sequence[int]


class Trained(Change):
    """Step `version` trained these groups."""

    version: int
    group_ids: Sequence[int]


class Undone(Change):
    """The learner started at `version` again: later steps are undone, these groups are ready."""

    version: int
    group_ids: Sequence[int]


class BatchDropped(Change):
    """The learner at `version` cannot train these groups; the groups of later leases are ready."""

    version: int
    group_ids: Sequence[int]
    message: str
    returned: Sequence[int]


class EvaluationStarted(Change):
    """Version `version` is evaluated on this number of prompts."""

    version: int
    num_prompts: int


class PromptsLeft(Change):
    """These training prompts are not issued from this position on; others remain."""

    position: int
    leavers: Sequence[Leaver]
    num_remaining: int
