"""The SQL that records each change of the buffer's state; tables in schema.py.

Each change of a group's state adds a row to `transitions`, in the same transaction.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from async_rl.buffer import changes
from async_rl.buffer.store.writer import Statement
from async_rl.core.heads import part_means
from async_rl.core.types import NO_VERSION, Group

# Each epoch issues a prompt again, and its row is the same.
_PROMPT = "INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?)"
_ADMIT = (
    "INSERT INTO groups (group_id, purpose, prompt_id, position, evaluation, num_samples, state,"
    " attempt, generator, incarnation, version, admitted_s, changed_s) VALUES (?, ?, ?, ?, ?, ?, ?,"
    " ?, ?, ?, ?, ?, ?)"
)
_HAND_OUT = (
    "UPDATE groups SET state='generating', attempt=?, generator=?, incarnation=?, version=?,"
    " changed_s=? WHERE group_id=?"
)
_END_ATTEMPT = "UPDATE groups SET state=?, reason=?, message=?, changed_s=? WHERE group_id=?"
# A list is one parameter: the statement is the same for any number of groups, so SQLite keeps it
# compiled, and no limit of parameters applies.
_LISTED = "(SELECT value FROM json_each(?))"
_SET_STATE = (
    f"UPDATE groups SET state=?, reason='', message='', changed_s=? WHERE group_id IN {_LISTED}"
)
_DROP_ALL = (
    "UPDATE groups SET state='dropped', reason='untrainable', message=?, changed_s=? WHERE"
    f" group_id IN {_LISTED}"
)
_COMPLETE = (
    "UPDATE groups SET state='ready', oldest_version=?, newest_version=?, num_tokens=?,"
    " num_trained_tokens=?, reward_mean=?, pass_rate=?, response_length_mean=?, truncated_share=?,"
    " generation_s=?, started_s=?, times=?, rewards=?, parts=?, changed_s=? WHERE group_id=?"
)
_BLOB = "INSERT OR REPLACE INTO blobs VALUES (?, ?)"
_NO_BLOB = "DELETE FROM blobs WHERE group_id=?"
_NO_BLOBS = f"DELETE FROM blobs WHERE group_id IN {_LISTED}"
_LEASE = (
    f"UPDATE groups SET state='leased', train_version=?, changed_s=? WHERE group_id IN {_LISTED}"
)
# From the row that was just changed, so that history and row cannot disagree.
_TRANSITIONS = (
    "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
    " SELECT group_id, attempt, state, ?, generator, ?, ? FROM groups WHERE group_id"
)
_TRANSITION = f"{_TRANSITIONS}=?"
_ALL_TRANSITIONS = f"{_TRANSITIONS} IN {_LISTED} ORDER BY group_id"
# A new row each time: a step that is trained again after it was undone has two rows.
_STEP = "INSERT INTO steps (version, committed_s) VALUES (?, ?)"
_TRAINED = (
    "INSERT INTO trained SELECT step_id, value FROM steps, json_each(?) WHERE version=? AND"
    " undone_s IS NULL"
)
_UNDO_STEPS = "UPDATE steps SET undone_s=? WHERE version>? AND undone_s IS NULL"
# Evaluations with open groups stay: these groups can be generated with the new weights.
_CLOSED_EVALUATIONS = (
    "(SELECT version FROM evaluations WHERE version>? AND version NOT IN (SELECT evaluation FROM"
    " groups WHERE evaluation IS NOT NULL AND state IN ('issued', 'generating')))"
)
_DETACH = f"UPDATE groups SET evaluation=NULL WHERE evaluation IN {_CLOSED_EVALUATIONS}"
_DELETE_EVALUATIONS = f"DELETE FROM evaluations WHERE version IN {_CLOSED_EVALUATIONS}"
_LOWER_VERSION = "UPDATE groups SET version=? WHERE state IN ('issued', 'generating') AND version>?"
_EVALUATION = "INSERT INTO evaluations VALUES (?, ?, ?, NULL, NULL)"
_LIFE = "INSERT INTO lives VALUES (?, ?, ?, ?)"
_LEAVE = "INSERT INTO left_prompts VALUES (?, ?, ?, ?, ?)"


def to_json(value: Any) -> str:
    """The value as JSON text."""
    return msgspec.json.encode(value).decode()


@functools.singledispatch
def statements_of(change: changes.Change, now_s: float) -> list[Statement]:
    """The statements that record a change; now_s: Unix seconds."""
    raise TypeError(f"{type(change).__name__} is not a change of the buffer's state")


@statements_of.register
def _(change: changes.Admitted, now_s: float) -> list[Statement]:
    group = change.group
    prompt = change.prompt
    purpose = group.purpose.value
    row = (
        group.group_id,
        purpose,
        prompt.prompt_id,
        group.index,
        None if group.evaluation == NO_VERSION else group.evaluation,
        change.num_samples,
        group.state.value,
        group.attempt,
        group.generator,
        group.incarnation,
        group.version,
        now_s,
        now_s,
    )
    return [
        (_PROMPT, (prompt.prompt_id, purpose, prompt.data_source, prompt.text)),
        (_ADMIT, row),
        (_TRANSITION, (now_s, group.version, "", group.group_id)),
    ]


@statements_of.register
def _(change: changes.HandedOut, now_s: float) -> list[Statement]:
    group = change.group
    row = (
        group.attempt,
        group.generator,
        group.incarnation,
        group.version,
        now_s,
        group.group_id,
    )
    return [(_HAND_OUT, row), (_TRANSITION, (now_s, group.version, "", group.group_id))]


@statements_of.register
def _(change: changes.Returned, now_s: float) -> list[Statement]:
    return _end_attempt(change, "issued", now_s)


@statements_of.register
def _(change: changes.Dropped, now_s: float) -> list[Statement]:
    # A group that was put and then dropped, for example over age, has trajectories.
    return [*_end_attempt(change, "dropped", now_s), (_NO_BLOB, (change.group_id,))]


@statements_of.register
def _(change: changes.Completed, now_s: float) -> list[Statement]:
    group = change.group
    summary = change.summary
    row = (
        *summary.row,
        group.generation_s,
        group.started_s,
        _times(group),
        to_json([sample.score.reward for sample in group.trajectories]),
        to_json(part_means(sample.score.parts for sample in group.trajectories)),
        now_s,
        group.group_id,
    )
    return [
        (_COMPLETE, row),
        (_BLOB, group),
        (_TRANSITION, (now_s, summary.oldest_version, "", group.group_id)),
    ]


@statements_of.register
def _(change: changes.LifeBegan, now_s: float) -> list[Statement]:
    return [(_LIFE, (change.life, change.incarnation, change.version, now_s))]


@statements_of.register
def _(change: changes.Leased, now_s: float) -> list[Statement]:
    listed = to_json(change.group_ids)
    return [
        (_LEASE, (change.train_version, now_s, listed)),
        (_ALL_TRANSITIONS, (now_s, change.train_version, "", listed)),
    ]


@statements_of.register
def _(change: changes.Trained, now_s: float) -> list[Statement]:
    listed = to_json(change.group_ids)
    return [
        (_STEP, (change.version, now_s)),
        (_SET_STATE, ("trained", now_s, listed)),
        # After the step's row, which it refers to.
        (_TRAINED, (listed, change.version)),
        (_ALL_TRANSITIONS, (now_s, change.version, "", listed)),
    ]


@statements_of.register
def _(change: changes.Undone, now_s: float) -> list[Statement]:
    version = change.version
    listed = to_json(change.group_ids)
    return [
        (_UNDO_STEPS, (now_s, version)),
        # Later versions will be other weights, so their finished evaluations do not count.
        (_DETACH, (version,)),
        (_DELETE_EVALUATIONS, (version,)),
        (_LOWER_VERSION, (version, version)),
        *_return(listed, version, f"learner started at version {version}", now_s),
    ]


@statements_of.register
def _(change: changes.BatchDropped, now_s: float) -> list[Statement]:
    version = change.version
    listed = to_json(change.group_ids)
    return [
        (_DROP_ALL, (change.message, now_s, listed)),
        (_NO_BLOBS, (listed,)),
        (_ALL_TRANSITIONS, (now_s, version, "untrainable", listed)),
        *_return(to_json(change.returned), version, "the batch before it was dropped", now_s),
    ]


@statements_of.register
def _(change: changes.EvaluationStarted, now_s: float) -> list[Statement]:
    return [(_EVALUATION, (change.version, change.num_prompts, now_s))]


@statements_of.register
def _(change: changes.PromptsLeft, now_s: float) -> list[Statement]:
    return [
        (_LEAVE, (leaver.index, leaver.prompt_id, change.position, leaver.score, now_s))
        for leaver in change.leavers
    ]


def _times(group: Group) -> bytes | None:
    """Return the moments of the samples; None if they were not recorded."""
    if not all(sample.clock for sample in group.trajectories):
        return None
    rows = [(sample.response_length, *sample.clock) for sample in group.trajectories]
    # float32 of seconds since the start of the group: precise to some microseconds.
    return np.array(rows, "<f4").tobytes()


def _return(listed: str, version: int, reason: str, now_s: float) -> list[Statement]:
    """Leased or trained groups are ready again."""
    return [
        (_SET_STATE, ("ready", now_s, listed)),
        (_ALL_TRANSITIONS, (now_s, version, reason, listed)),
    ]


def _end_attempt(
    change: changes.Returned | changes.Dropped, state: str, now_s: float
) -> list[Statement]:
    group_id = change.group_id
    reason = change.reason
    return [
        (_END_ATTEMPT, (state, reason, change.message, now_s, group_id)),
        (_TRANSITION, (now_s, None, reason, group_id)),
    ]
