"""The run's store: every prompt, group, state and step in one SQLite file, as typed changes and
reads.

Invariants
- The caller queues changes and awaits `flush()`: when it returns, all that was queued before is
  committed (store_writer.py).
- One change is one list of statements, never split over two transactions: the file always holds a
  prefix of the changes.
- One process writes: a second one is refused by a lock on `<path>.lock`, which dies with its
  holder.  Others read at any time (WAL).
Used by processes/buffer.py; tables in store_schema.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np

from async_rl.buffer.admission import OpenGroup
from async_rl.buffer.replay import StoredGroup
from async_rl.buffer.store.schema import SCHEMA_VERSION, TABLES
from async_rl.buffer.store.writer import Statement, Writer, connect, hold_lock
from async_rl.core import codec
from async_rl.core.errors import InfrastructureError
from async_rl.core.summary import Summary, part_means
from async_rl.core.types import NO_VERSION, FloatArray, Group, GroupState, Prompt, Purpose

KEPT_SAMPLES = 16
"""Of each evaluation, the first so many stay stored."""

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
_STATE = "UPDATE groups SET state=?, reason=?, message=?, changed_s=? WHERE group_id=?"
_LISTED = "(SELECT value FROM json_each(?))"
_STATES = (
    f"UPDATE groups SET state=?, reason='', message='', changed_s=? WHERE group_id IN {_LISTED}"
)
_READY = (
    "UPDATE groups SET state='ready', oldest_version=?, newest_version=?, num_tokens=?,"
    " num_trained_tokens=?, reward_mean=?, pass_rate=?, response_length_mean=?, truncated_share=?,"
    " generation_s=?, rewards=?, parts=?, changed_s=? WHERE group_id=?"
)
_BLOB = "INSERT OR REPLACE INTO blobs VALUES (?, ?)"
_LEASE = (
    f"UPDATE groups SET state='leased', train_version=?, changed_s=? WHERE group_id IN {_LISTED}"
)
_TRANSITION = (
    "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason) VALUES"
    " (?, ?, ?, ?, ?, ?, ?)"
)
_MOVED = (
    "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
    " SELECT group_id, attempt, state, ?, generator, ?, ? FROM groups WHERE group_id"
)
_MOVED_ONE, _MOVED_ALL = f"{_MOVED}=?", f"{_MOVED} IN {_LISTED} ORDER BY group_id"
_STEP = "INSERT INTO steps (version, committed_s) VALUES (?, ?)"
_TRAINED = (
    "INSERT INTO trained SELECT step_id, value FROM steps, json_each(?) WHERE version=? AND"
    " undone_s IS NULL"
)
_CLOSED_EVALUATIONS = (
    "SELECT version FROM evaluations WHERE version>? AND version NOT IN (SELECT evaluation FROM"
    " groups WHERE evaluation IS NOT NULL AND state IN ('issued', 'generating'))"
)
_SCORES = (
    "SELECT evaluation, avg(pass_rate) FROM groups JOIN evaluations e ON evaluation=e.version"
    " WHERE finished_s IS NOT NULL AND state='ready' GROUP BY evaluation"
)
_EVALUATION = "SELECT group_id, state FROM groups WHERE evaluation=? ORDER BY position"
_FIGURES = "SELECT figures FROM evaluations WHERE version=? AND figures IS NOT NULL"
_SERVED = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups WHERE evaluation=? AND"
    " position>=?)"
)
_FORGET = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups INDEXED BY groups_by_batch"
    " WHERE train_version>=? AND train_version<? AND state='trained')"
)
_ADVANTAGES = "INSERT OR REPLACE INTO advantages SELECT group_id, ? FROM blobs WHERE group_id=?"
_UNUSED = "DELETE FROM advantages WHERE group_id NOT IN (SELECT group_id FROM blobs)"
_LEAVE = "INSERT INTO left_prompts VALUES (?, ?, ?, ?, ?)"
_LEFT = (
    "SELECT position, json_group_array(prompt_index) FROM left_prompts GROUP BY position ORDER BY"
    " position"
)
_REWARDS = (
    "SELECT position, rewards FROM groups WHERE purpose='train' AND rewards IS NOT NULL ORDER BY"
    " group_id"
)
_STORED = "SELECT group_id, oldest_version, newest_version, coalesce(train_version, -1) FROM groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a buffer that starts finds. counts: training groups per (state, reason). left: prompts
    that left the data, by position.
    """

    learner_version: int
    next_group_id: int
    next_index: int
    open: list[OpenGroup]
    prompt_ids: dict[int, str]
    ready: list[StoredGroup]
    leased: list[StoredGroup]
    counts: dict[tuple[str, str], int]
    evaluations: dict[int, bool]
    left: list[tuple[int, list[int]]]


class Store:
    """Writes changes, reads groups. Use as an async context manager."""

    def __init__(
        self, path: Path, *, durability: Literal["normal", "full"], clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._clock = clock
        self._reading = threading.Lock()
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_lock(path))
            self._writer = Writer(path, durability=durability)
            stack.callback(self._writer.close_file)
            self._writer.create(TABLES, SCHEMA_VERSION)
            self._reader = connect(path)
            stack.callback(self._reader.close)
            self.forgotten_before = self._one(
                "SELECT coalesce(max(value), 0) FROM meta WHERE key='forgotten_before'"
            )
            self._files = stack.pop_all()

    # ---- changes: queued at once, committed by flush()

    def admit(self, group: OpenGroup, prompt: Prompt, num_samples: int) -> None:
        """A new group, in the state it has."""
        now = self._clock()
        evaluation = None if group.evaluation == NO_VERSION else group.evaluation
        what = (
            group.group_id,
            group.purpose.value,
            prompt.prompt_id,
            group.index,
            evaluation,
            num_samples,
        )
        row = (*what, group.state.value, group.attempt)
        self._writer.put(
            (_PROMPT, (prompt.prompt_id, group.purpose.value, prompt.data_source, prompt.text)),
            (_ADMIT, (*row, group.generator, group.incarnation, group.version, now, now)),
            (
                _TRANSITION,
                (
                    group.group_id,
                    group.attempt,
                    group.state.value,
                    now,
                    group.generator,
                    group.version,
                    "",
                ),
            ),
        )

    def hand_out(self, group: OpenGroup) -> None:
        """A group that waited goes to a generator."""
        now = self._clock()
        self._writer.put(
            (
                _HAND_OUT,
                (
                    group.attempt,
                    group.generator,
                    group.incarnation,
                    group.version,
                    now,
                    group.group_id,
                ),
            ),
            (
                _TRANSITION,
                (
                    group.group_id,
                    group.attempt,
                    "generating",
                    now,
                    group.generator,
                    group.version,
                    "",
                ),
            ),
        )

    def give_back(self, group_id: int, *, reason: str, message: str) -> None:
        """The attempt ended without a result; the group waits for the next."""
        self._move(group_id, GroupState.ISSUED, reason, message)

    def drop(self, group_id: int, *, reason: str, message: str) -> None:
        """The group will not be trained; its trajectories, if any, are deleted."""
        self._move(
            group_id,
            GroupState.DROPPED,
            reason,
            message,
            ("DELETE FROM blobs WHERE group_id=?", (group_id,)),
        )

    def put(self, group: Group, summary: Summary) -> None:
        """The group is complete."""
        now = self._clock()
        told = (
            _json([sample.score.reward for sample in group.trajectories]),
            _json(part_means(group.trajectories)),
        )
        self._writer.put(
            (_READY, (*summary.row, group.generation_s, *told, now, group.group_id)),
            (_BLOB, group),
            (
                _TRANSITION,
                (
                    group.group_id,
                    group.attempt,
                    "ready",
                    now,
                    group.generator,
                    summary.oldest_version,
                    "",
                ),
            ),
        )

    def leave(self, position: int, leavers: Iterable[tuple[int, str, float]]) -> None:
        """These training prompts, (index, id, mean reward), are issued no more from this position
        on.
        """
        now = self._clock()
        self._writer.put(
            *(
                (_LEAVE, (index, prompt_id, position, score, now))
                for index, prompt_id, score in leavers
            )
        )

    def lease(self, train_version: int, group_ids: Iterable[int]) -> None:
        """These groups are the batch for `train_version`."""
        now, listed = self._clock(), _listed(group_ids)
        self._writer.put(
            (_LEASE, (train_version, now, listed)), (_MOVED_ALL, (now, train_version, "", listed))
        )

    def commit(self, version: int, group_ids: Iterable[int]) -> None:
        """Step `version` trained these groups."""
        now, listed = self._clock(), _listed(group_ids)
        self._writer.put(
            (_STEP, (version, now)),
            (_STATES, ("trained", now, listed)),
            (_TRAINED, (listed, version)),
            (_MOVED_ALL, (now, version, "", listed)),
        )

    def keep_advantages(self, advantages: Iterable[tuple[int, FloatArray]]) -> None:
        """(group, advantage of each response token, sample after sample) of groups whose
        trajectories are stored; for people.
        """
        self._writer.put(
            *(
                (_ADVANTAGES, (values.astype(np.float16).tobytes(), group_id))
                for group_id, values in advantages
            )
        )

    def undo(self, version: int, group_ids: Iterable[int], *, reason: str) -> None:
        """The learner stands at `version`: later steps are undone, these groups are ready again and
        stay planned for their batch.

        Finished evaluations of later versions are forgotten: those versions will be other weights.
        What is being generated may be as old as `version` from now on.
        """
        now, listed = self._clock(), _listed(group_ids)
        self._writer.put(
            ("UPDATE steps SET undone_s=? WHERE version>? AND undone_s IS NULL", (now, version)),
            (
                f"UPDATE groups SET evaluation=NULL WHERE evaluation IN ({_CLOSED_EVALUATIONS})",
                (version,),
            ),
            (f"DELETE FROM evaluations WHERE version IN ({_CLOSED_EVALUATIONS})", (version,)),
            (
                "UPDATE groups SET version=? WHERE state IN ('issued', 'generating') AND version>?",
                (version, version),
            ),
            (_STATES, ("ready", now, listed)),
            (_MOVED_ALL, (now, version, reason, listed)),
        )

    def start_evaluation(self, version: int, num_prompts: int) -> None:
        """Version `version` is being evaluated."""
        self._writer.put(
            (
                "INSERT INTO evaluations VALUES (?, ?, ?, NULL, NULL)",
                (version, num_prompts, self._clock()),
            )
        )

    def finish_evaluation(self, version: int, figures: dict[str, float]) -> None:
        """Its figures were reported; its trajectories have served, but for a few that people may
        look at.
        """
        self._writer.put(
            (
                "UPDATE evaluations SET finished_s=?, figures=? WHERE version=?",
                (self._clock(), _json(figures), version),
            ),
            (_SERVED, (version, KEPT_SAMPLES)),
        )

    def forget_before(self, version: int) -> None:
        """Deletes the trajectories of groups trained by steps up to `version`; the learner can then
        no longer go back before it.
        """
        self._writer.put(
            (_FORGET, (self.forgotten_before, version)),
            (_UNUSED, ()),
            ("INSERT OR REPLACE INTO meta VALUES ('forgotten_before', ?)", (version,)),
        )
        self.forgotten_before = version

    async def flush(self) -> None:
        """Returns once everything queued so far is committed. Raises InfrastructureError if it
        could not be.
        """
        await self._writer.flush()

    async def failed(self) -> None:
        """Raises what ended the store, when it ends."""
        await self._writer.failed()

    # ---- reads

    def recover(self) -> Recovered:
        """The state that the file holds. Called before anything is written."""
        version = self._one("SELECT coalesce(max(version), 0) FROM steps WHERE undone_s IS NULL")
        last = self._reader.execute(
            "SELECT position FROM groups WHERE purpose='train' ORDER BY group_id DESC LIMIT 1"
        ).fetchone()
        rows = self._reader.execute(
            "SELECT group_id, purpose, position, state, attempt, generator, incarnation, version,"
            " evaluation, prompt_id FROM groups INDEXED BY groups_open WHERE state IN ('issued',"
            " 'generating') ORDER BY group_id"
        ).fetchall()
        counts = self._reader.execute(
            "SELECT state, reason, count(*) FROM groups WHERE purpose='train' GROUP BY state,"
            " reason"
        ).fetchall()
        evaluations = self._reader.execute(
            "SELECT version, finished_s IS NOT NULL FROM evaluations"
        ).fetchall()
        return Recovered(
            learner_version=version,
            next_group_id=self._one("SELECT coalesce(max(group_id), -1) FROM groups") + 1,
            next_index=last[0] + 1 if last else 0,
            open=[_open_group(row) for row in rows],
            prompt_ids={row[0]: row[9] for row in rows},
            ready=self._stored("groups_ready", "state='ready' AND purpose='train'"),
            leased=self._stored("groups_leased", "state='leased'"),
            counts={(state, reason): count for state, reason, count in counts},
            evaluations={version: bool(finished) for version, finished in evaluations},
            left=[
                (position, msgspec.json.decode(indices))
                for position, indices in self._reader.execute(_LEFT)
            ],
        )

    def rewards(self) -> list[tuple[int, list[float]]]:
        """(position, reward of each sample) of every training group that came back. Called before
        anything is written.
        """
        return [
            (position, msgspec.json.decode(rewards))
            for position, rewards in self._reader.execute(_REWARDS)
        ]

    async def trained_after(self, version: int) -> list[StoredGroup]:
        """Groups trained by steps after `version`, planned for the version they were trained on."""
        return await asyncio.to_thread(
            self._stored, "groups_by_batch", "state='trained' AND train_version>=?", version
        )

    async def read_groups(self, group_ids: Sequence[int]) -> list[Group]:
        """The trajectories of these groups, in this order. Raises InfrastructureError if some are
        not stored.
        """
        return await asyncio.to_thread(self._read_groups, group_ids)

    async def evaluation_groups(self, version: int) -> list[tuple[int, bool]]:
        """(group id, whether it is complete) of every group of an evaluation, in the order of its
        prompts.
        """
        return [
            (group_id, state == "ready")
            for group_id, state in await asyncio.to_thread(self._rows, _EVALUATION, version)
        ]

    async def evaluation_figures(self, version: int) -> dict[str, float] | None:
        """What was reported of a finished evaluation; None if it is not finished."""
        return next(
            (
                msgspec.json.decode(figures)
                for (figures,) in await asyncio.to_thread(self._rows, _FIGURES, version)
            ),
            None,
        )

    async def evaluation_scores(self) -> dict[int, float]:
        """Mean pass rate of each finished evaluation, by version."""
        return dict(await asyncio.to_thread(self._rows, _SCORES))

    def _read_groups(self, group_ids: Sequence[int]) -> list[Group]:
        groups = []
        for group_id in group_ids:
            rows = self._rows("SELECT payload FROM blobs WHERE group_id=?", group_id)
            if not rows:
                raise InfrastructureError(
                    f"{self._path} no longer holds the trajectories of group {group_id}"
                )
            groups.append(codec.decode(rows[0][0], Group))
        return groups

    def _stored(self, index: str, where: str, *parameters: int) -> list[StoredGroup]:
        rows = self._rows(
            f"{_STORED} INDEXED BY {index} WHERE {where} ORDER BY group_id", *parameters
        )
        return [
            StoredGroup(group_id=i, oldest_version=old, newest_version=new, planned=planned)
            for i, old, new, planned in rows
        ]

    def _rows(self, query: str, *parameters: int) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, parameters).fetchall()

    def _one(self, query: str) -> int:
        return int(self._reader.execute(query).fetchone()[0])

    def _move(
        self, group_id: int, state: GroupState, reason: str, message: str, *more: Statement
    ) -> None:
        now = self._clock()
        self._writer.put(
            (_STATE, (state.value, reason, message, now, group_id)),
            (_MOVED_ONE, (now, None, reason, group_id)),
            *more,
        )

    async def close(self) -> None:
        """Commits what is queued and closes the file."""
        await self._writer.finish()
        with self._reading:  # a read that outlives its caller still uses the connection
            self._files.close()

    async def __aenter__(self) -> Self:
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _listed(group_ids: Iterable[int]) -> str:
    return _json(list(group_ids))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _open_group(row: Sequence[Any]) -> OpenGroup:
    group_id, purpose, index, state, attempt, generator, incarnation, version, evaluation = row[:9]
    return OpenGroup(
        group_id=group_id,
        purpose=Purpose(purpose),
        index=index,
        state=GroupState(state),
        attempt=attempt,
        generator=generator if state == "generating" else "",
        incarnation=incarnation if state == "generating" else "",
        version=version,
        evaluation=NO_VERSION if evaluation is None else evaluation,
    )
