"""Pages of a run's store, for people: lists of groups, a group, its history, ages, prompts.

Invariants: reads only, also while the run writes; every query is bounded, either by an index or by
the number of newest groups that it looks at, so that a page of a long run takes milliseconds.
"""

from __future__ import annotations

import msgspec

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.ledger import OF_STEP, GroupRow, group_rows

PAGE = 50
WINDOW = 20_000
"""Newest groups that sorting and counting look at: a tenth of a second of one core."""
_SORTS = {
    "newest": "group_id DESC",
    "best": "reward_mean DESC, group_id DESC",
    "worst": "reward_mean, group_id DESC",
    "longest": "response_length_mean DESC, group_id DESC",
}
SORTS = tuple(_SORTS)
_WHERE = {
    "purpose": "purpose=:purpose",
    "step": "state='trained' AND train_version=:step - 1",
    "prompt_id": "prompt_id=:prompt_id",
    # instr and not LIKE: a percent sign in the text must mean itself.
    "text": "prompt_id IN (SELECT prompt_id FROM prompts WHERE purpose=:purpose AND"
    " instr(lower(text), lower(:text)) > 0)",
    "failed": "pass_rate < 1",
    "truncated": "truncated_share > 0",
    "stored": "group_id IN (SELECT group_id FROM blobs)",
    # By number and not by offset, so that new groups do not shift the pages.
    "before": "group_id < :before",
}
"""The condition of each field of a filter that has a value."""
_SPANS = (
    "SELECT * FROM (SELECT group_id, state, at_s - min(at_s) OVER () AS start_s, lead(at_s) OVER"
    " (PARTITION BY group_id ORDER BY transition_id) - min(at_s) OVER () AS end_s FROM transitions"
    f" WHERE group_id IN (SELECT group_id FROM groups {OF_STEP})) WHERE end_s IS NOT NULL"
)
STAGES = ("issued", "generating", "ready", "leased")


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The filter of a page of groups. text, response: a part of the prompt, and of a stored
    response, ignoring case; before: only groups with a smaller number, for the next page.

    Raises ValueError for an unknown order. response: filtered by the readers that decode tokens.
    """

    purpose: str = "train"
    step: int | None = None
    prompt_id: str = ""
    text: str = ""
    response: str = ""
    failed: bool = False
    truncated: bool = False
    stored: bool = False
    sort: str = "newest"
    before: int | None = None

    def __post_init__(self) -> None:
        if self.sort not in _SORTS:
            raise ValueError(f"sort={self.sort}: the orders are {', '.join(_SORTS)}")


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A group's time in one state. start_s, end_s: seconds after the first group was admitted."""

    state: str
    start_s: float
    end_s: float


def page_of(store: Connection, chosen: Filter, *, most: int = PAGE) -> list[GroupRow]:
    """Return the groups that pass the filter, at most `most`."""
    fields = msgspec.structs.asdict(chosen)
    # By identity, because the condition `before=0` equals False.
    unset = [name for name, value in fields.items() if value is False or value in ("", None)]
    where = [sql for name, sql in _WHERE.items() if name not in unset]
    tail = f"WHERE {' AND '.join(where)} ORDER BY group_id DESC"
    if chosen.sort != "newest":
        # The table has no index by reward and a reader cannot add one, so only the newest
        # WINDOW groups are sorted; sorting all would take seconds in a long run.
        newest = f"SELECT group_id FROM groups {tail} LIMIT {WINDOW}"
        tail = f"WHERE group_id IN ({newest}) ORDER BY {_SORTS[chosen.sort]}"
    return group_rows(store, f"{tail} LIMIT {most}", fields)


def prompt_text(store: Connection, purpose: str, prompt_id: str) -> str:
    """Return the text of a prompt, empty if it is unknown."""
    row = store.execute(
        "SELECT text FROM prompts WHERE purpose=? AND prompt_id=?", (purpose, prompt_id)
    ).fetchone()
    return "" if row is None else str(row[0])


def ages(store: Connection) -> list[tuple[int, int]]:
    """Return (age in versions, number of groups) of the newest trained groups."""
    return store.execute(
        "SELECT train_version - oldest_version AS age, count(*) FROM (SELECT train_version,"
        " oldest_version FROM groups WHERE state='trained' AND purpose='train' ORDER BY"
        " group_id DESC LIMIT ?) GROUP BY age HAVING age IS NOT NULL ORDER BY age",
        (WINDOW,),
    ).fetchall()


def spans(store: Connection, step: int) -> dict[int, list[Span]]:
    """Return, by group, the times in each state of the groups that a step trained."""
    found: dict[int, list[Span]] = {}
    for group_id, state, start_s, end_s in store.execute(_SPANS, (step,)):
        span = Span(state=state, start_s=start_s, end_s=end_s)
        found.setdefault(group_id, []).append(span)
    return found
