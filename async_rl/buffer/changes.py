"""The changes of the buffer's state, as values: `BufferState` decides them, the store records them.

Each change is recorded in one transaction, in the order of the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.buffer.groups import OpenGroup
from async_rl.core.summary import Summary
from async_rl.core.types import Group, Prompt
from async_rl.data.score_filter import Leaver


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A new group, in the state that it has. num_samples: trajectories of a complete group."""

    group: OpenGroup
    prompt: Prompt
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """A generator received the ticket of a group that had waited."""

    group: OpenGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """An attempt ended without a result; the group waits for its next attempt."""

    group_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The group will not be trained; its trajectories, if any, are deleted."""

    group_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """All samples of the group arrived."""

    group: Group
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """These groups are the batch for `train_version`."""

    train_version: int
    group_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Step `version` trained these groups."""

    version: int
    group_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """The learner started at `version` again: later steps are undone, these groups are ready."""

    version: int
    group_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStarted:
    """Version `version` is evaluated on this number of prompts."""

    version: int
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsLeft:
    """These training prompts are not issued from this position on; others remain."""

    position: int
    leavers: Sequence[Leaver]
    num_remaining: int


Change = (
    Admitted
    | HandedOut
    | Returned
    | Dropped
    | Completed
    | Leased
    | Trained
    | Undone
    | EvaluationStarted
    | PromptsLeft
)
