"""Statements about what was handed out. Prompts: each position of the data order was issued once,
for its prompt, and has an end. Calls of agents: each answer that the policy gave is trained, or
left out for a reason.

Evidence: the ledger and, for the order itself, the run's prompts.sqlite. A gap is a position that
no group has although later ones were issued; the start before it shows when it was skipped. A
session counts its answers apart from its record, of which the row of tokens and the trained calls
are made.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rl.buffer.store.connection import Connection
from async_rl.config.run import RunConfig
from async_rl.core.text import ranges
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, RunPrompts
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, listed, statement
from async_rl.runs.samples import issued_prompts

# Each position that does not follow its predecessor, which is itself if it was issued twice.
_MISSING = (
    "SELECT previous, position, admitted_s FROM (SELECT position, admitted_s, lag(position, 1,"
    " (SELECT coalesce(max(last_position), -1) FROM compacted)) OVER (ORDER BY position) AS"
    " previous FROM groups WHERE purpose='train') WHERE position > previous + 1 OR position ="
    " previous"
)
_ISSUED = "SELECT position, prompt_id FROM groups WHERE purpose='train' ORDER BY position"
_ENDS = (
    "SELECT state, iif(state='dropped', reason, ''), sum(number) FROM counts WHERE purpose='train'"
    " GROUP BY 1, 2 ORDER BY 3 DESC"
)
_COMPACTED = "SELECT sum(number) FROM compacted_groups WHERE purpose='train' HAVING sum(number) > 0"
_NEVER_TRAINED = (
    "SELECT prompt_id FROM groups WHERE purpose='train' GROUP BY prompt_id HAVING min(state) ="
    " 'dropped' AND max(state) = 'dropped'"
)


def prompts(
    run_dir: Path, config: RunConfig, store: Connection, starts: Sequence[Event]
) -> Iterator[Statement]:
    """Yield the statements about the order and the ends of prompts."""
    order = issued_prompts(run_dir, config, store)
    issued = store.execute(_ISSUED).fetchall()
    yield statement(
        "prompts",
        "each position of the data order was issued exactly once",
        broken=[_gap(row, order, starts) for row in store.execute(_MISSING)],
        unknown=[
            f"of {number} compacted groups only the number is known"
            for (number,) in store.execute(_COMPACTED)
        ],
        evidence=[f"{len(issued)} positions were checked"],
    )
    wrong = [
        f"position {position} was issued for {prompt_id}, not for {expected}"
        for position, prompt_id in issued
        if order and prompt_id != (expected := order.prompt(Purpose.TRAIN, position).prompt_id)
    ]
    yield statement(
        "prompts",
        "each position was issued for the prompt of data.order",
        broken=wrong,
        unknown=[] if order else [f"the run has no {PROMPTS_FILE}"],
        evidence=[f"{len(issued)} positions were compared with the order"] if order else (),
    )
    yield _ends(store)


def _gap(row: tuple[int, int, float], order: RunPrompts | None, starts: Sequence[Event]) -> str:
    previous, position, admitted_s = row
    skipped = range(previous + 1, position)
    if not skipped:
        return f"position {position} was issued twice"
    ids = [order.prompt(Purpose.TRAIN, each).prompt_id for each in skipped[:5]] if order else []
    before = [at(start.at_s) for start in starts if start.at_s <= admitted_s]
    return (
        f"position {ranges(skipped)} ({', '.join(ids)}) was skipped after the start of"
        f" {before[-1] if before else 'an unknown time'}"
    )


def _ends(store: Connection) -> Statement:
    counts = store.execute(_ENDS).fetchall()
    total = sum(number for *_, number in counts)
    lost = [prompt_id for (prompt_id,) in store.execute(_NEVER_TRAINED)]
    (num_left,) = store.execute("SELECT count(*) FROM left_prompts").fetchone()
    return statement(
        "prompts",
        "each issued prompt was trained, was dropped for a reason, or is open",
        broken=[
            f"{number} groups were dropped without a reason"
            for state, reason, number in counts
            if state == "dropped" and not reason
        ],
        evidence=[
            *(f"{s} {why}".strip() + f": {n} of {total} ({n / total:.1%})" for s, why, n in counts),
            f"{num_left} prompts left the data (data.filter); {len(lost)} were issued and always"
            f" dropped {listed(lost) or ''}",
        ],
    )


CALLS = (
    "SELECT group_id, state, reason, num_trained_tokens, calls AS 'calls [stored_json]' FROM groups"
    " WHERE purpose='train' AND calls != '[]'"
)
"""The groups of agents that were complete."""


def agent_calls(groups: Iterable[tuple[int, str, str, int, list[Any]]]) -> Statement:
    """Return the statement. groups: as CALLS selects them."""
    broken = []
    num_unknown = 0
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    for group_id, state, reason, num_trained, samples in groups:
        # Groups of earlier versions have no numbers.
        if not all(call["of"] for calls in samples for call in calls) or not all(samples):
            num_unknown += 1
            continue
        place = f"group {group_id}"
        num_tokens = 0
        for number, calls in enumerate(samples):
            missing = {at: "" for at in range(1, calls[0]["of"] + 1)}
            for call in calls:
                del missing[call["number"]]
                why = call["left_out"]
                if call["end_tokens"]:
                    num_tokens += call["num_tokens"]
                    why = "" if state == "trained" else reason or "open"
                elif not why:
                    missing[call["number"]] = f" (role {call['role']!r})"
                    why = "lost"
                ends[call["role"]][why] += 1
            broken += [
                f"{place}, sample {number}: call {at} of {calls[0]['of']}{role} is neither trained"
                " nor left out"
                for at, role in sorted(missing.items())
            ]
        if num_tokens != num_trained:
            broken.append(
                f"{place}: {num_trained} tokens are trained, of which its calls wrote {num_tokens}"
            )
    evidence = []
    for role, found in sorted(ends.items()):
        trained = found.pop("", 0)
        left = ", ".join(f"{why}: {number}" for why, number in sorted(found.items()))
        total = found.total()
        evidence.append(
            f"role {role!r}: {total + trained} served, {trained} trained, {total} left out ({left})"
        )
    return statement(
        "calls",
        "each answer to an agent is trained, or left out for a reason",
        broken=broken,
        unknown=[f"{num_unknown} groups have no numbers of calls"] if num_unknown else (),
        evidence=evidence,
    )
