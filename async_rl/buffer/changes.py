"""The changes of the buffer's state, as values with the SQL that records them: `BufferState`
decides them, the store executes their SQL in one transaction, in the order of the decisions.

In the SQL `:name` is a field of the change, a list as JSON, and `:now_s` the Unix time. Each change
of a group's state adds a row to `transitions`. Tables in store/schema.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from async_rl.buffer.groups import OpenGroup
from async_rl.core.frozen import frozen
from async_rl.core.heads import Summary, means_by_name
from async_rl.core.types import NO_VERSION, Group, Prompt

_ONE = "= :group_id"
# A list is one parameter: the statement is the same for any number of groups, so SQLite keeps it
# compiled, and no limit of parameters applies.
_ALL = "IN (SELECT value FROM json_each(:group_ids))"
_DELETE_ONE = f"DELETE FROM blobs WHERE group_id {_ONE}"
_DELETE_ALL = f"DELETE FROM blobs WHERE group_id {_ALL}"


def _update(groups: str, values: str) -> str:
    return f"UPDATE groups SET {values}, changed_s=:now_s WHERE group_id {groups}"


def _note(groups: str, *, version: str = ":version", reason: str = "''") -> str:
    # From the row that was just changed, so that history and row cannot disagree.
    return (
        "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
        f" SELECT group_id, attempt, state, :now_s, generator, {version}, {reason} FROM groups"
        f" WHERE group_id {groups} ORDER BY group_id"
    )


def _make_ready(groups: str, reason: str) -> tuple[str, str]:
    """The SQL by which leased or trained groups are ready again."""
    return (
        _update(groups, "state='ready', reason='', message=''"),
        _note(groups, reason=reason),
    )


def to_json(value: Any) -> str:
    """The value as JSON text."""
    return msgspec.json.encode(value).decode()


@frozen
class Leaver:
    """A prompt that leaves: its index among the training prompts, its id and its mean reward."""

    index: int
    prompt_id: str
    score: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all changes."""

    statements: ClassVar[tuple[str, ...]]

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the names in the statements. A Group stands for its encoded bytes."""
        fields = msgspec.structs.asdict(self)
        return {k: to_json(v) if isinstance(v, list | tuple) else v for k, v in fields.items()}


class Admitted(Change):
    """A new group, in the state that it has. num_samples: trajectories of a complete group."""

    statements = (
        # Each epoch issues a prompt again, and its row is the same.
        "INSERT OR IGNORE INTO prompts VALUES (:prompt_id, :purpose, :data_source, :text)",
        "INSERT INTO groups (group_id, purpose, prompt_id, position, evaluation, num_samples,"
        " state, attempt, generator, incarnation, version, admitted_s, changed_s) VALUES"
        f" (:group_id, :purpose, :prompt_id, :index, nullif(:evaluation, {NO_VERSION}),"
        " :num_samples, :state, :attempt, :generator, :incarnation, :version, :now_s, :now_s)",
        _note(_ONE),
    )
    group: OpenGroup
    # People read the text of a prompt in the ledger after the data file has changed.
    prompt: Prompt
    num_samples: int

    @property
    def parameters(self) -> dict[str, Any]:
        """As `Change.parameters`."""
        prompt = msgspec.structs.asdict(self.prompt)
        return prompt | dataclasses.asdict(self.group) | {"num_samples": self.num_samples}


class HandedOut(Change):
    """A generator received the ticket of a group that had waited."""

    statements = (
        _update(
            _ONE,
            "state='generating', attempt=:attempt, generator=:generator, incarnation=:incarnation,"
            " version=:version",
        ),
        _note(_ONE),
    )
    group: OpenGroup

    @property
    def parameters(self) -> dict[str, Any]:
        """As `Change.parameters`."""
        return dataclasses.asdict(self.group)


class Returned(Change):
    """An attempt has no result; the group waits for its next attempt."""

    statements = (
        _update(_ONE, "state='issued', reason=:reason, message=:message"),
        _note(_ONE, version="NULL", reason=":reason"),
    )
    group_id: int
    reason: str
    message: str


class Dropped(Change):
    """The group will not be trained; its trajectories, if any, are deleted."""

    statements = (
        _update(_ONE, "state='dropped', reason=:reason, message=:message"),
        _note(_ONE, version="NULL", reason=":reason"),
        _DELETE_ONE,
    )
    group_id: int
    reason: str
    message: str


class Completed(Change):
    """All samples of the group arrived."""

    statements = (
        _update(
            _ONE,
            "state='ready', oldest_version=:oldest_version, newest_version=:newest_version,"
            " num_tokens=:num_tokens, num_trained_tokens=:num_trained_tokens,"
            " reward_mean=:reward_mean, pass_rate=:pass_rate,"
            " response_length_mean=:response_length_mean, truncated_share=:truncated_share,"
            " generation_s=:generation_s, started_s=:started_s, times=:times, rewards=:rewards,"
            " parts=:parts",
        ),
        "INSERT OR REPLACE INTO blobs VALUES (:group_id, :payload)",
        _note(_ONE, version=":oldest_version"),
    )
    group: Group
    summary: Summary

    @property
    def parameters(self) -> dict[str, Any]:
        """As `Change.parameters`."""
        group = self.group
        scores = [sample.score for sample in group.trajectories]
        return dataclasses.asdict(self.summary) | {
            "group_id": group.group_id,
            "generation_s": group.generation_s,
            "started_s": group.started_s,
            "times": _times(group),
            "rewards": to_json([score.reward for score in scores]),
            "parts": to_json(means_by_name(score.parts for score in scores)),
            "payload": group,
        }


class LifeBegan(Change):
    """A life of the learner started at `version`."""

    statements = ("INSERT INTO lives VALUES (:life, :incarnation, :version, :now_s)",)
    life: int
    incarnation: str
    version: int


class Leased(Change):
    """These groups are the batch for `train_version`."""

    statements = (
        _update(_ALL, "state='leased', train_version=:train_version"),
        _note(_ALL, version=":train_version"),
    )
    train_version: int
    group_ids: Sequence[int]


class Trained(Change):
    """Step `version` trained these groups."""

    statements = (
        # A new row each time: a step that is trained again after it was undone has two rows.
        "INSERT INTO steps (version, committed_s) VALUES (:version, :now_s)",
        _update(_ALL, "state='trained', reason='', message=''"),
        # After the step's row, which it refers to.
        "INSERT INTO trained SELECT step_id, value FROM steps, json_each(:group_ids) WHERE"
        " version=:version AND undone_s IS NULL",
        _note(_ALL),
    )
    version: int
    group_ids: Sequence[int]


class Undone(Change):
    """The learner started at `version` again: later steps are undone, these groups are ready."""

    statements = (
        "UPDATE steps SET undone_s=:now_s WHERE version>:version AND undone_s IS NULL",
        # Later versions will be other weights, so their evaluations do not count.
        "UPDATE groups SET evaluation=NULL WHERE evaluation>:version",
        "DELETE FROM evaluations WHERE version>:version",
        "UPDATE groups SET version=:version WHERE state IN ('issued', 'generating') AND"
        " version>:version",
        *_make_ready(_ALL, "'learner started at version ' || :version"),
    )
    version: int
    group_ids: Sequence[int]


class BatchDropped(Change):
    """The learner at `version` cannot train these groups; the groups of later leases are ready."""

    statements = (
        _update(_ALL, "state='dropped', reason='untrainable', message=:message"),
        _DELETE_ALL,
        _note(_ALL, reason="'untrainable'"),
        *_make_ready(
            "IN (SELECT value FROM json_each(:returned))", "'the batch before it was dropped'"
        ),
    )
    version: int
    group_ids: Sequence[int]
    message: str
    returned: Sequence[int]


class EvaluationStarted(Change):
    """Version `version` is evaluated on this number of prompts."""

    statements = ("INSERT INTO evaluations VALUES (:version, :num_prompts, :now_s, NULL, NULL)",)
    version: int
    num_prompts: int


class PromptsLeft(Change):
    """These training prompts are not issued from this position on."""

    statements = (
        "INSERT INTO left_prompts SELECT json_extract(value, '$.index'), json_extract(value,"
        " '$.prompt_id'), :position, json_extract(value, '$.score'), :now_s FROM"
        " json_each(:leavers)",
    )
    position: int
    leavers: Sequence[Leaver]


def _times(group: Group) -> bytes | None:
    """Return the moments of the samples; None if they were not recorded."""
    if not all(sample.clock for sample in group.trajectories):
        return None
    rows = [(sample.response_length, *sample.clock) for sample in group.trajectories]
    # float32 of seconds since the start of the group: precise to some microseconds.
    return np.array(rows, "<f4").tobytes()
