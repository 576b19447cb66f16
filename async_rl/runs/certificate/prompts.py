"""Statements about prompts: each position of the data order was issued once, for its prompt, and
has an end.

Evidence: the ledger and, for the order itself, the run's prompts.sqlite. A gap is a position that
no group has although later ones were issued; the start before it shows when it was skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.buffer.store.connection import Connection
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, RunPrompts, open_prompts
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, listed, ranges, statement

_LEFT = (
    "SELECT position, json_group_array(prompt_index) AS 'indices [stored_json]' FROM left_prompts"
    " GROUP BY position ORDER BY position"
)
_MISSING = (
    "SELECT previous + 1, position - 1, admitted_s FROM (SELECT position, admitted_s, lag(position,"
    " 1, (SELECT coalesce(max(last_position), -1) FROM compacted)) OVER (ORDER BY position) AS"
    " previous FROM groups WHERE purpose='train') WHERE position > previous + 1"
)
_REPEATED = (
    "SELECT position, count(*) FROM groups WHERE purpose='train' GROUP BY position HAVING count(*)"
    " > 1"
)
_ENDS = "SELECT state, reason, number FROM counts WHERE purpose='train' ORDER BY number DESC"
_NEVER_TRAINED = (
    "SELECT prompt_id FROM groups WHERE purpose='train' GROUP BY prompt_id HAVING sum(state ="
    " 'dropped') > 0 AND sum(state != 'dropped') = 0"
)


def prompts(
    run_dir: Path, config: RunConfig, store: Connection, starts: Sequence[Event]
) -> Iterator[Statement]:
    """Yield the statements about the order and the ends of prompts."""
    order = _order(run_dir, config, store)
    yield _each_once(store, order, starts)
    yield _as_ordered(store, order)
    yield _ends(store)


def _order(run_dir: Path, config: RunConfig, store: Connection) -> RunPrompts | None:
    """Return the prompts in the order of the run, without those that left; None without the file
    of the prompts.
    """
    path = run_dir / PROMPTS_FILE
    if not path.is_file():
        return None
    opened = open_prompts(path, config, vocabulary_size=0)
    for position, indices in store.execute(_LEFT):
        opened.order.remove(indices, position)
    return opened


def _each_once(store: Connection, order: RunPrompts | None, starts: Sequence[Event]) -> Statement:
    broken = []
    for first, last, admitted_s in store.execute(_MISSING):
        name = "" if order is None else f" ({_named(order, range(first, last + 1))})"
        before = [start for start in starts if start.at_s <= admitted_s]
        since = f" after the start of {at(before[-1].at_s)}" if before else ""
        broken.append(f"position {ranges([first, last])}{name} was skipped{since}")
    broken += [
        f"position {position} was issued {number} times"
        for position, number in store.execute(_REPEATED)
    ]
    (issued, compacted) = store.execute(
        "SELECT (SELECT count(*) FROM groups WHERE purpose='train'), (SELECT"
        " coalesce(sum(number), 0) FROM compacted_groups WHERE purpose='train')"
    ).fetchone()
    continued = []
    for start in starts[1:]:
        (position,) = store.execute(
            "SELECT coalesce(max(position), -1) + 1 FROM groups WHERE purpose='train' AND"
            " admitted_s < ?",
            (start.at_s,),
        ).fetchone()
        continued.append(f"the start of {at(start.at_s)} continued at position {position}")
    evidence = [f"{issued + compacted} positions were issued", *listed(continued)]
    unknown = []
    if compacted:
        unknown = [f"the rows of {compacted} groups are compacted; only their number is checked"]
    return statement(
        "prompts",
        "each position of the data order was issued exactly once",
        broken=broken,
        unknown=unknown,
        evidence=evidence,
    )


def _named(order: RunPrompts, positions: range) -> str:
    ids = [order.prompt(Purpose.TRAIN, position).prompt_id for position in positions[:5]]
    return ", ".join([*ids, "..."] if len(positions) > len(ids) else ids)


def _as_ordered(store: Connection, order: RunPrompts | None) -> Statement:
    promise = "each position was issued for its prompt, so each prompt once per epoch"
    if order is None:
        unknown = [f"the run has no {PROMPTS_FILE} (a copy from the mirror has none)"]
        return statement("prompts", promise, unknown=unknown)
    wrong: dict[str, list[int]] = {}
    num_checked = 0
    rows = store.execute(
        "SELECT position, prompt_id, admitted_s FROM groups WHERE purpose='train' ORDER BY position"
    )
    for position, prompt_id, _ in rows:
        num_checked += 1
        expected = order.prompt(Purpose.TRAIN, position).prompt_id
        if prompt_id != expected:
            wrong.setdefault(f"{prompt_id} instead of {expected}", []).append(position)
    first = min((min(positions) for positions in wrong.values()), default=0)
    broken = [
        f"position {ranges(positions)} was issued for {pair}" for pair, positions in wrong.items()
    ]
    if broken:
        broken.insert(0, f"the order is another one from position {first} on")
    evidence = [f"{num_checked} positions compared with the order of seed and data"]
    return statement("prompts", promise, broken=broken, evidence=evidence)


def _ends(store: Connection) -> Statement:
    counts = store.execute(_ENDS).fetchall()
    total = sum(number for *_, number in counts)
    broken = [
        f"{number} groups were dropped without a reason"
        for state, reason, number in counts
        if state == "dropped" and not reason
    ]
    evidence = [
        f"{state}{f' ({reason})' if state == 'dropped' else ''}: {number} of {total}"
        f" ({number / total:.1%})"
        for state, reason, number in _merged(counts)
    ]
    (num_left,) = store.execute("SELECT count(*) FROM left_prompts").fetchone()
    if num_left:
        evidence.append(f"{num_left} prompts left the data by data.filter")
    lost = [prompt_id for (prompt_id,) in store.execute(_NEVER_TRAINED)]
    if lost:
        names = ", ".join(lost[:5])
        evidence.append(f"{len(lost)} prompts were issued and always dropped, such as {names}")
    return statement(
        "prompts",
        "each issued prompt was trained, was dropped for a reason, or is open",
        broken=broken,
        evidence=evidence,
    )


def _merged(counts: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Return the counts by state and, of dropped groups, by reason."""
    merged: dict[tuple[str, str], int] = {}
    for state, reason, number in counts:
        # In other states the reason is why the last attempt failed.
        key = (state, reason if state == "dropped" else "")
        merged[key] = merged.get(key, 0) + number
    return [(*key, number) for key, number in merged.items()]
