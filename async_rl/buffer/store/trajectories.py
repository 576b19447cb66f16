"""The groups and trajectories in a run's store, for people and for who trains a step again: lists
of groups, a group, its ages, times and prompt, the batch of a step.

Reads only, also while the run writes. Every query for people is bounded, by an index or by the
number of newest groups that it looks at, so that a page of a long run takes milliseconds. Steps
that the learner undid are not part of the history.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.buffer.store.connection import Connection, stored_group
from async_rl.buffer.store.ledger import OF_STEP, GroupRow, group_rows, reading
from async_rl.core.frozen import Value
from async_rl.core.types import Group

# A step is complete if none of its groups lost its trajectories.
_COMPLETE = (
    "SELECT version FROM steps JOIN (SELECT * FROM trained UNION ALL SELECT * FROM reused) USING"
    " (step_id) LEFT JOIN blobs USING (group_id) WHERE undone_s IS NULL GROUP BY version HAVING"
    " count(*) = count(blobs.group_id) ORDER BY version"
)
_OF_BATCH = (
    f"{OF_STEP} OR group_id IN (SELECT group_id FROM reused JOIN steps USING (step_id) WHERE"
    " version=? AND undone_s IS NULL) ORDER BY group_id"
)


# The last hand-out before the group was ready: earlier attempts failed without a result.
_TIMES = (
    "SELECT purpose, generator, (SELECT max(at_s) FROM transitions WHERE group_id=groups.group_id"
    " AND state='generating') AS handed_out_s, generation_s, (SELECT max(at_s) FROM transitions"
    " WHERE group_id=groups.group_id AND state='ready') AS ready_s, num_tokens, num_samples,"
    " coalesce(times, x'') FROM groups WHERE generation_s IS NOT NULL"
    " ORDER BY group_id DESC LIMIT ?"
)
_STEPS = "SELECT version, committed_s FROM steps WHERE undone_s IS NULL ORDER BY version"
_COLUMNS = 4
MOST_GROUPS = 20_000
"""Enough for the means of any run; a run of 10^7 groups would take minutes to read and to simulate.
"""


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


class Rollout(Value):
    """A stored group with its prompt and the step that trained it, or None."""

    group: Group
    prompt: str
    step: int | None


def complete_steps(store: Connection) -> list[int]:
    """Return the steps whose trajectories are all in the store, in order."""
    return [version for (version,) in store.execute(_COMPLETE)]


def batch_rows(store: Connection, step: int) -> list[GroupRow]:
    """Return the groups that a step trained, in the order of its batch; empty if the store has
    no such step, or if its rows were compacted.
    """
    # The buffer orders a batch by group (buffer/replay.py).
    return group_rows(store, _OF_BATCH, [step, step])


def batch_of(store: Connection, step: int) -> list[Group] | None:
    """Return the batch that a step trained, in its order, or None if its trajectories are not
    all in the store.
    """
    groups = [stored_group(store, row.group_id) for row in batch_rows(store, step)]
    complete = [group.unpacked() for group in groups if group is not None]
    # A batch is repeated as a whole or not at all: without a group its gradient would differ.
    if complete and len(complete) == len(groups):
        return complete
    return None


def rollout_of(store: Connection, row: GroupRow) -> Rollout | None:
    """Return a group with its trajectories, or None if they are not stored any more."""
    group = stored_group(store, row.group_id)
    if group is None:
        return None
    prompt = prompt_text(store, row.purpose, row.prompt_id)
    return Rollout(group=group.unpacked(), prompt=prompt, step=row.step)


def rollouts(store: Connection, *, step: int | None, most: int) -> list[Rollout]:
    """Return the newest `most` stored training groups, of one step or (None) of all."""
    rows = page_of(store, Filter(step=step, stored=True), most=most)
    return [rollout for row in rows if (rollout := rollout_of(store, row)) is not None]


class Filter(Value):
    """The filter of a page of groups. text: a part of the prompt, ignoring case; before: only
    groups with a smaller number, for the next page.

    Raises ValueError for an unknown order.
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

    def __post_init__(self) -> None:
        if self.sort not in _SORTS:
            raise ValueError(f"sort={self.sort}: the orders are {', '.join(_SORTS)}")


class Span(Value):
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


class GroupTimes(NamedTuple):
    """One finished group. Unix seconds of the buffer.

    generation_s: from its start to its last token. samples: float32 [N, 4] of each sample: response
    tokens, and seconds from the start of the group to first token (may be NaN), last token and
    score; N is 0 if they were not recorded.
    """

    purpose: str
    generator: str
    handed_out_s: float
    generation_s: float
    ready_s: float
    num_tokens: int
    num_samples: int
    samples: npt.NDArray[np.float32]


def group_times(run_dir: Path, *, most: int = MOST_GROUPS) -> list[GroupTimes]:
    """Return the newest finished groups in the order of admission."""
    with reading(run_dir) as connection:
        rows = reversed(connection.execute(_TIMES, (most,)).fetchall())
    return [
        GroupTimes._make([*row[:-1], np.frombuffer(row[-1], "<f4").reshape(-1, _COLUMNS)])
        for row in rows
        # A compacted group has no transitions left.
        if None not in row
    ]


def step_times(run_dir: Path) -> tuple[dict[int, float], list[float]]:
    """Return the Unix time of each committed step, and of the start of each life of the learner."""
    with reading(run_dir) as connection:
        steps = {int(version): at_s for version, at_s in connection.execute(_STEPS)}
        return steps, [at_s for (at_s,) in connection.execute("SELECT started_s FROM lives")]
