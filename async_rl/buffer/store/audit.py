"""Checks of the promises about states and staleness over the whole history of a store.

The promises: every group is in one state and reached it by allowed changes; no prompt was left out
or issued twice; admission kept its bound; nothing over age was leased or trained; in the surviving
history steps follow each other without a gap, each trained exactly its groups, and each group was
trained once; what may still be trained is stored; the counters are true. Tables in schema.py.

The history of compacted groups is deleted. Only their counts are checked, and the audit reports it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Literal

import msgspec

from async_rl.buffer.store.ledger import compacted_counts

_NEXT = {
    "": ("issued", "generating"),
    # issued to ready: the generator was lost, and its result still arrived
    "issued": ("generating", "ready", "dropped"),
    "generating": ("issued", "ready", "dropped"),
    "ready": ("leased", "dropped"),
    "leased": ("trained", "ready", "dropped"),
    "trained": ("ready",),  # only a learner that went back returns a trained group
    "dropped": (),
}
_ACTIVE = ("issued", "generating", "ready", "leased")
# One cause usually breaks a promise for thousands of groups.
_MAX_REPORTED = 20


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the run on which the promises depend."""

    groups_per_step: int
    max_staleness_versions: int
    age_rule: Literal["drop", "mask", "exact"]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The number of checked rows, and the broken promises as sentences, at most 20. unchecked: what
    could not be checked, as sentences.
    """

    num_groups: int
    num_transitions: int
    num_steps: int
    num_undone_steps: int
    problems: list[str]
    unchecked: list[str] = []


def audit(connection: sqlite3.Connection, promise: Promise) -> Audit:
    """Read everything once. The connection must show one moment (`ledger.reading`)."""
    checks = (_file, _histories, _order, _steps, _staleness, _stored, _counters)
    problems = [problem for check in checks for problem in check(connection, promise)]
    num_more = len(problems) - _MAX_REPORTED
    if num_more > 0:
        problems[_MAX_REPORTED:] = [f"and {num_more} more"]

    def count(query: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

    return Audit(
        num_groups=count("groups"),
        num_transitions=count("transitions"),
        num_steps=count("steps WHERE undone_s IS NULL"),
        num_undone_steps=count("steps WHERE undone_s IS NOT NULL"),
        problems=problems,
        unchecked=list(_unchecked(connection)),
    )


def _unchecked(connection: sqlite3.Connection) -> Iterator[str]:
    num_groups = sum(compacted_counts(connection).values())
    (last,) = connection.execute("SELECT max(version) FROM compacted").fetchone()
    if num_groups:
        yield (
            f"the rows of {num_groups} groups of steps 1 to {last} are compacted"
            ": their changes of state, their age, the bound of admission at"
            " that time and whether one was trained twice"
        )


def _file(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    # Not integrity_check, which also compares every index with its table and takes much longer.
    for (line,) in connection.execute("PRAGMA quick_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"


def _histories(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """Every change was allowed, admission kept its bound, and each history agrees with the
    state of its group.
    """
    limit = (promise.max_staleness_versions + 1) * promise.groups_per_step
    states: dict[int, str] = {}
    attempts: dict[int, int] = {}
    num_active = 0
    # One pass in the order of the changes: the bound of admission is about each moment.
    rows = connection.execute(
        "SELECT group_id, t.state, t.attempt, purpose='train' FROM transitions t LEFT JOIN groups"
        " USING (group_id) ORDER BY transition_id"
    )
    for group_id, state, attempt, is_training in rows:
        before = states.get(group_id, "")
        if state not in _NEXT[before]:
            yield f"group {group_id} went from {before or 'nothing'} to {state}"
        if state == "generating" and attempt != attempts.get(group_id, 0) + 1:
            yield (
                f"group {group_id} has attempt {attempt} after attempt {attempts.get(group_id, 0)}"
            )
        if is_training and not before and num_active >= limit:
            yield (
                f"group {group_id} was admitted while {num_active} were active; (max_staleness + 1)"
                f" x groups_per_step is {limit}"
            )
        if is_training:
            num_active += int(state in _ACTIVE) - int(before in _ACTIVE)
        states[group_id] = state
        attempts[group_id] = attempt
    for group_id, state, attempt in connection.execute(
        "SELECT group_id, state, attempt FROM groups"
    ):
        if states.pop(group_id, None) != state or attempts[group_id] != attempt:
            yield (
                f"group {group_id} is {state}, attempt {attempt}, which is not the end of its"
                " history"
            )
    for group_id in states:
        yield f"group {group_id} has a history but no row"


def _order(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    """Group ids and the positions of training prompts have no gap."""
    last_group, last_position = connection.execute(
        "SELECT coalesce(max(last_group_id), -1), coalesce(max(last_position), -1) FROM compacted"
    ).fetchone()
    compacted = compacted_counts(connection)
    num_training = sum(number for key, number in compacted.items() if key[0] == "train")
    positions = "coalesce(max(position), -1) FROM groups WHERE purpose='train'"
    for name, query, num_compacted, last_compacted in (
        (
            "group ids",
            "SELECT count(*), coalesce(max(group_id), -1) FROM groups",
            sum(compacted.values()),
            last_group,
        ),
        (
            "positions in the order of prompts",
            f"SELECT count(DISTINCT position), {positions}",
            num_training,
            last_position,
        ),
        ("training groups", f"SELECT count(*), {positions}", num_training, last_position),
    ):
        num_rows, last = connection.execute(query).fetchone()
        num_stored = num_rows + num_compacted
        num_issued = max(last, last_compacted) + 1
        if num_stored != num_issued:
            yield f"{num_stored} {name} are stored, {num_issued} were issued"


def _steps(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """In the history that survives, each step trained its groups and each trained group has one
    step.
    """
    surviving = "FROM trained JOIN steps USING (step_id) WHERE undone_s IS NULL"
    steps = "SELECT version FROM steps WHERE undone_s IS NULL ORDER BY version"
    versions = [version for (version,) in connection.execute(steps)]
    if versions != list(range(1, len(versions) + 1)):
        missing = sorted(set(range(1, max(versions) + 1)) - set(versions))
        yield f"the surviving steps are not 1 to {len(versions)}: {missing} are missing"
    sizes = dict(connection.execute(f"SELECT version, count(*) {surviving} GROUP BY version"))
    sizes |= dict(connection.execute("SELECT version, num_groups FROM compacted"))
    for version in versions:
        if sizes.get(version, 0) != promise.groups_per_step:
            yield (
                f"step {version} trained {sizes.get(version, 0)} groups instead of"
                f" {promise.groups_per_step}"
            )
    for group_id, times in connection.execute(
        f"SELECT group_id, count(*) {surviving} GROUP BY group_id HAVING count(*) > 1"
    ):
        yield f"group {group_id} was trained {times} times"
    for group_id, state in connection.execute(
        "SELECT group_id, state FROM groups WHERE (state='trained') != (group_id IN (SELECT"
        f" group_id {surviving}))"
    ):
        step = "no surviving step" if state == "trained" else "a surviving step"
        yield f"group {group_id} is {state}, but {step} trained it"
    for group_id, version, train_version in connection.execute(
        "SELECT group_id, steps.version, train_version FROM groups JOIN trained USING (group_id)"
        " JOIN steps USING (step_id) WHERE undone_s IS NULL AND steps.version != train_version + 1"
    ):
        yield (
            f"group {group_id} was leased for version {train_version} and trained by step {version}"
        )


def _staleness(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """No batch of any history contained a group that was over age."""
    # Where over-age tokens are masked, one young token makes a group trainable.
    decisive = "newest_version" if promise.age_rule == "mask" else "oldest_version"
    for group_id, train_version, version in connection.execute(
        f"SELECT group_id, t.version, {decisive} FROM transitions t JOIN groups g USING (group_id)"
        f" WHERE t.state='leased' AND ({decisive} IS NULL OR t.version - {decisive} > ?)",
        (promise.max_staleness_versions,),
    ):
        yield (
            f"group {group_id} with tokens of version {version} was leased for version"
            f" {train_version}"
        )
    for (group_id,) in connection.execute(
        "SELECT group_id FROM groups WHERE state='dropped' AND reason=''"
    ):
        yield f"group {group_id} was dropped without a reason"


def _stored(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    """Groups that may still be trained have their trajectories; dropped ones have none."""
    needed = (
        "purpose='train' AND (state IN ('ready', 'leased') OR state='trained' AND train_version>="
        "(SELECT coalesce(max(value), 0) FROM meta WHERE key='forgotten_before'))"
    )
    for (group_id,) in connection.execute(
        f"SELECT group_id FROM groups WHERE {needed} AND group_id NOT IN (SELECT group_id FROM"
        " blobs)"
    ):
        yield f"the trajectories of group {group_id} are lost"
    # Trajectories of dropped groups would fill the disk of a long run.
    for (group_id,) in connection.execute(
        "SELECT group_id FROM blobs WHERE group_id NOT IN (SELECT group_id FROM groups WHERE state"
        " IN ('ready', 'leased', 'trained'))"
    ):
        yield f"group {group_id} is not complete, yet trajectories of it are stored"


def _counters(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    """The counters are the numbers of groups."""
    rows = connection.execute(
        "SELECT purpose, state, reason, count(*) FROM groups GROUP BY 1, 2, 3"
    )
    actual = {(purpose, state, reason): number for purpose, state, reason, number in rows}
    for key, number in compacted_counts(connection).items():
        actual[key] = actual.get(key, 0) + number
    rows = connection.execute("SELECT purpose, state, reason, number FROM counts WHERE number!=0")
    counted = {(purpose, state, reason): number for purpose, state, reason, number in rows}
    for key in sorted(actual.keys() | counted.keys()):
        if actual.get(key) != counted.get(key):
            yield f"{counted.get(key, 0)} groups are counted as {key}, {actual.get(key, 0)} are"
