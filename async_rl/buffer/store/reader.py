"""The reads of a run's store by its buffer: the state at a start, trajectories, evaluations."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from async_rl.buffer.groups import OpenGroup, Recovered, StoredGroup
from async_rl.buffer.store.connection import PAYLOAD, connect, intact, select, stored_group
from async_rl.core.errors import InfrastructureError
from async_rl.core.heads import PackedGroup
from async_rl.core.types import NO_VERSION, DropReason, Purpose

T = TypeVar("T")
LEARNER_VERSION = "SELECT coalesce(max(version), 0) FROM steps WHERE undone_s IS NULL"
# The newest group may be compacted while an older one, which it overtook, is not.
_NEXT_GROUP = (
    "SELECT max(coalesce((SELECT max(group_id) FROM groups), -1), coalesce((SELECT"
    " max(last_group_id) FROM compacted), -1)) + 1"
)
NEXT_INDEX = (
    "SELECT max(coalesce((SELECT position FROM groups WHERE purpose='train' ORDER BY group_id DESC"
    " LIMIT 1), -1), coalesce((SELECT max(last_position) FROM compacted), -1)) + 1"
)
# Without INDEXED BY, SQLite may scan the table, which takes seconds in a long run.
_OPEN_ROWS = "groups INDEXED BY groups_open WHERE state IN ('issued', 'generating')"
# The row keeps the generator of the last attempt for the ledger, but no generator works on an
# issued group.
_OPEN = (
    "SELECT group_id, purpose, position AS \"index\", state, attempt, iif(state='issued', '',"
    " generator) AS generator, iif(state='issued', '', incarnation) AS incarnation, version,"
    f" coalesce(evaluation, {NO_VERSION}) AS evaluation, (SELECT count(*) FROM transitions WHERE"
    f" group_id=groups.group_id AND reason IN ('{DropReason.SCORING_OUTAGE}',"
    f" '{DropReason.NOT_TAKEN}')) AS num_spared FROM {_OPEN_ROWS} ORDER BY group_id"
)
_STORED = (
    f"SELECT group_id, oldest_version, newest_version, coalesce(train_version, {NO_VERSION}) AS"
    " planned FROM groups INDEXED BY {index} WHERE {where} ORDER BY group_id"
)
_READY = _STORED.format(index="groups_ready", where="state='ready' AND purpose='train'")
_LEASED = _STORED.format(index="groups_leased", where="state='leased'")
_TRAINED = _STORED.format(index="groups_by_batch", where="state='trained' AND train_version>=?")
_SET_ASIDE = (
    "SELECT train_version, count(*) FROM groups INDEXED BY groups_by_batch WHERE train_version>=?"
    " AND state='dropped' AND reason='untrainable' GROUP BY train_version"
)
LEFT = (
    "SELECT position, json_group_array(prompt_index) AS 'left [stored_json]' FROM left_prompts"
    " GROUP BY position ORDER BY position"
)
CHOSEN = "SELECT position, prompt_index FROM chosen_prompts"
_REWARDS = (
    "SELECT position, rewards AS \"rewards [stored_json]\" FROM groups WHERE purpose='train' AND"
    " rewards IS NOT NULL ORDER BY group_id"
)
# From the report: the groups of an old evaluation have no rows any more.
_SCORES = (
    "SELECT version, score FROM (SELECT version, json_extract(figures, '$.\"eval/pass_at_1\"') AS"
    " score FROM evaluations) WHERE score IS NOT NULL"
)
_NEWEST_OF_PROMPT = (
    f"SELECT {PAYLOAD} JOIN groups USING (group_id) WHERE prompt_id=? AND purpose=? ORDER BY"
    " group_id DESC LIMIT 1"
)
_ACTIVE = (
    f"SELECT group_id FROM {_OPEN_ROWS} UNION ALL SELECT group_id FROM ({_READY}) UNION ALL SELECT"
    f" group_id FROM ({_LEASED})"
)
# Only groups that may still be trained: to compare all rows of a long run takes seconds.
_DAMAGED_ROWS = (
    f"SELECT group_id FROM (SELECT * FROM groups NOT INDEXED WHERE group_id IN ({_ACTIVE}) EXCEPT"
    f" SELECT * FROM groups INDEXED BY groups_copy WHERE group_id IN ({_ACTIVE}))"
)
_DAMAGED = (
    f"SELECT group_id FROM blobs WHERE group_id IN ({_ACTIVE}) AND checksum(payload, group_id) IS"
    " NOT checksum"
)


class StoreReader:
    """A connection that reads, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connection = connect(path)
        # Reads run on worker threads, and a connection serves one thread at a time.
        self._reading = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        with self._reading:  # a read that outlives its caller still uses the connection
            self.connection.close()

    def recover(self, steps_reused: int = 0) -> Recovered:
        """The state that the file contains. Call it before anything is written. Raises
        InfrastructureError if a group that may still be trained is damaged.

        steps_reused: the number of newest steps whose groups the next step trains again.
        """
        for (group_id,) in self._rows(_DAMAGED_ROWS):
            raise InfrastructureError(
                f"{self._path}: the row of group {group_id} is damaged; resume the run from its"
                " mirror (checkpoint.mirror), or start a new one"
            )
        for (group_id,) in self._rows(_DAMAGED):
            intact(group_id, None)
        learner_version = self.number(LEARNER_VERSION)
        return Recovered(
            learner_version=learner_version,
            lives=self._rows("SELECT incarnation, life, version FROM lives"),
            set_aside=dict(self._rows(_SET_ASIDE, learner_version)),
            newest_version=self.number("SELECT coalesce(max(version), 0) FROM steps"),
            next_group_id=self.number(_NEXT_GROUP),
            next_index=self.number(NEXT_INDEX),
            open=self._objects(OpenGroup, _OPEN),
            prompt_ids=dict(self._rows(f"SELECT group_id, prompt_id FROM {_OPEN_ROWS}")),
            ready=self._objects(StoredGroup, _READY),
            leased=self._objects(StoredGroup, _LEASED),
            trained=self._objects(StoredGroup, _TRAINED, learner_version - steps_reused),
            evaluations=dict(self._rows("SELECT version, finished_s IS NOT NULL FROM evaluations")),
            left=self._rows(LEFT),
            chosen=self._rows(CHOSEN),
            rewards=self._rewards(),
        )

    async def trained_after(self, version: int) -> list[StoredGroup]:
        """Groups trained by steps after `version`, planned for the version they were trained on."""
        return await asyncio.to_thread(self._objects, StoredGroup, _TRAINED, version)

    async def groups(self, group_ids: Sequence[int]) -> list[PackedGroup]:
        """The trajectories of these groups, in this order. Raises InfrastructureError if some are
        not stored.
        """
        return await asyncio.to_thread(self._groups, group_ids)

    async def newest_of_prompt(self, prompt_id: str, purpose: Purpose) -> PackedGroup | None:
        """The newest complete group of a prompt; None if no trajectories are stored, or damaged."""
        rows = await asyncio.to_thread(self._rows, _NEWEST_OF_PROMPT, prompt_id, purpose)
        return rows[0][0] if rows else None

    async def evaluation_groups(self, version: int) -> list[tuple[int, bool]]:
        """(group id, is complete) of each group of an evaluation, in the order of its prompts."""
        return await asyncio.to_thread(
            self._rows,
            "SELECT group_id, state='ready' FROM groups WHERE evaluation=? ORDER BY position",
            version,
        )

    async def evaluation_figures(self, version: int) -> dict[str, float] | None:
        """The reported metrics of an evaluation; None if it was not reported."""
        rows = await asyncio.to_thread(
            self._rows,
            'SELECT figures AS "figures [stored_json]" FROM evaluations WHERE version=?',
            version,
        )
        return rows[0][0] if rows else None

    async def evaluation_scores(self) -> dict[int, float]:
        """Mean pass rate of each finished evaluation, by version."""
        return dict(await asyncio.to_thread(self._rows, _SCORES))

    def _groups(self, group_ids: Sequence[int]) -> list[PackedGroup]:
        groups = []
        for group_id in group_ids:
            with self._reading:
                group = stored_group(self.connection, group_id)
            if group is None:
                raise InfrastructureError(
                    f"{self._path} no longer contains the trajectories of group {group_id}"
                )
            groups.append(group)
        return groups

    def _objects(self, kind: type[T], query: str, *parameters: int) -> list[T]:
        with self._reading:
            return select(self.connection, kind, query, parameters)

    def _rewards(self) -> Iterator[tuple[int, list[float]]]:
        # A generator: most runs never read them, and a long run has millions.
        yield from self._rows(_REWARDS)

    def _rows(self, query: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        with self._reading:
            return self.connection.execute(query, parameters).fetchall()

    def number(self, query: str) -> int:
        """The one value that a query returns."""
        return int(self._rows(query)[0][0])
