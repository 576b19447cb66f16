"""Pages of a run's store, for people: lists of groups, a group, its history, ages, prompts.

Invariants: reads only, also while the run writes; every query is bounded, either by an index or by
the number of newest groups that it looks at, so that a page of a long run takes milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from async_rl.buffer.store.ledger import GROUP_COLUMNS, GroupRow, fields_of, reading
from async_rl.buffer.store.trajectories import stored_advantages, stored_group
from async_rl.core.types import Group

PAGE = 50
WINDOW = 20_000
"""Newest groups that sorting and counting look at: a tenth of a second of one core."""
_COMPARED = 1000  # newest stored groups of each run, compared for common prompts
_SORTS = {
    "newest": "group_id DESC",
    "best": "reward_mean DESC, group_id DESC",
    "worst": "reward_mean, group_id DESC",
    "longest": "response_length_mean DESC, group_id DESC",
}
SORTS = tuple(_SORTS)
STAGES = ("issued", "generating", "ready", "leased")


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The filter of a page of groups. text: a part of the prompt, ignoring case; before: only
    groups with a smaller number, for the next page.
    """

    purpose: str = "train"
    step: int | None = None
    prompt_id: str = ""
    text: str = ""
    failed: bool = False
    truncated: bool = False
    stored: bool = False
    sort: str = "newest"
    before: int | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A group's time in one state. start_s, end_s: seconds after the first group was admitted."""

    state: str
    start_s: float
    end_s: float


@contextlib.contextmanager
def browsing(path: Path) -> Iterator[Browser]:
    """Open one moment of the store. Raises Unavailable if it does not exist, InfrastructureError if
    it cannot be read.
    """
    with reading(path) as connection:
        yield Browser(connection)


class Browser:
    """The pages of one moment of a store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def groups(self, chosen: Filter, *, most: int = PAGE) -> list[GroupRow]:
        """Return the groups that pass the filter, at most `most`."""
        where = ["purpose=?"]
        parameters: list[str | int] = [chosen.purpose]
        if chosen.step is not None:
            where.append("state='trained' AND train_version=?")
            parameters.append(chosen.step - 1)
        if chosen.prompt_id:
            where.append("groups.prompt_id=?")
            parameters.append(chosen.prompt_id)
        if chosen.text:
            where.append(
                # instr and not LIKE: a percent sign in the text must mean itself.
                "groups.prompt_id IN (SELECT prompt_id FROM prompts WHERE purpose=? AND"
                " instr(lower(text), lower(?)) > 0)"
            )
            parameters += [chosen.purpose, chosen.text]
        if chosen.failed:
            where.append("pass_rate < 1")
        if chosen.truncated:
            where.append("truncated_share > 0")
        if chosen.stored:
            where.append("group_id IN (SELECT group_id FROM blobs)")
        # By number and not by offset, so that new groups do not shift the pages.
        if chosen.before is not None:
            where.append("group_id < ?")
            parameters.append(chosen.before)
        condition = " AND ".join(where)
        query = f"SELECT {GROUP_COLUMNS} FROM groups WHERE {condition} ORDER BY group_id DESC"
        if chosen.sort != "newest":
            # The table has no index by reward and a reader cannot add one, so only the newest
            # WINDOW groups are sorted; sorting all would take seconds in a long run.
            query = f"SELECT * FROM ({query} LIMIT {WINDOW}) ORDER BY {_SORTS[chosen.sort]}"
        rows = self._connection.execute(f"{query} LIMIT ?", (*parameters, most))
        return [_row(row) for row in rows]

    def one_group(self, group_id: int) -> GroupRow | None:
        """Return one group, or None if the store has no such group."""
        rows = self._connection.execute(
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE group_id=?", (group_id,)
        )
        values = rows.fetchone()
        return None if values is None else _row(values)

    def trajectories(self, group_id: int) -> tuple[Group, bytes] | None:
        """Return a group's trajectories and its stored advantages (float16, or empty); None if they
        are no longer stored.
        """
        group = stored_group(self._connection, group_id)
        if group is None:
            return None
        return group, stored_advantages(self._connection, group_id)

    def prompt_text(self, purpose: str, prompt_id: str) -> str:
        """Return the text of a prompt, empty if it is unknown."""
        row = self._connection.execute(
            "SELECT text FROM prompts WHERE purpose=? AND prompt_id=?", (purpose, prompt_id)
        ).fetchone()
        return "" if row is None else str(row[0])

    def ages(self) -> list[tuple[int, int]]:
        """Return (age in versions, number of groups) of the newest trained groups."""
        rows = self._connection.execute(
            "SELECT train_version - oldest_version AS age, count(*) FROM (SELECT train_version,"
            " oldest_version FROM groups WHERE state='trained' AND purpose='train' ORDER BY"
            " group_id DESC LIMIT ?) GROUP BY age HAVING age IS NOT NULL ORDER BY age",
            (WINDOW,),
        )
        return [(int(age), int(count)) for age, count in rows]

    def spans(self, step: int) -> dict[int, list[Span]]:
        """Return, by group, the times in each state of the groups that a step trained."""
        rows = self._connection.execute(
            "SELECT group_id, transitions.state, at_s FROM groups JOIN transitions USING (group_id)"
            " WHERE train_version=? AND groups.state='trained' ORDER BY group_id, transition_id",
            (step - 1,),
        ).fetchall()
        if not rows:
            return {}
        start_s = min(at_s for _, _, at_s in rows)
        history: dict[int, list[tuple[str, float]]] = {}
        for group_id, state, at_s in rows:
            history.setdefault(group_id, []).append((state, at_s - start_s))
        return {
            group_id: [
                Span(state=state, start_s=at_s, end_s=next_s)
                for (state, at_s), (_, next_s) in itertools.pairwise(entries)
            ]
            for group_id, entries in history.items()
        }

    def common_prompts(self, other: Browser) -> list[tuple[str, str]]:
        """Return (prompt id, purpose) of the prompts with responses in both stores, the newest in
        this store first.
        """
        stored = (
            "SELECT prompt_id, purpose FROM (SELECT group_id FROM blobs ORDER BY group_id DESC"
            " LIMIT ?) JOIN groups USING (group_id) GROUP BY prompt_id, purpose"
            " ORDER BY max(group_id) DESC"
        )
        known = set(other._connection.execute(stored, (_COMPARED,)))
        common = [pair for pair in self._connection.execute(stored, (_COMPARED,)) if pair in known]
        return common[:PAGE]


def _row(values: Sequence[object]) -> GroupRow:
    return GroupRow(**fields_of(values))
