"""Checks the promises about states and staleness over the whole history of a store, not only its
present.

What is promised: every group is in one state and came there by allowed changes; no prompt was left
out or issued twice; admission kept its bound; nothing over age was leased or trained; in the
history that survives, steps follow each other without a gap, each trained exactly its groups, and
each group was trained once; what is to be trained is stored. Used by `async-rl ledger --audit` and
by the chaos test; tables in store_schema.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Literal

import msgspec

_NEXT = {
    "": ("issued", "generating"),
    "issued": (
        "generating",
        "ready",
        "dropped",
    ),  # ready: its holder was given up, and its result still came
    "generating": ("issued", "ready", "dropped"),
    "ready": ("leased", "dropped"),
    "leased": ("trained", "ready"),
    "trained": ("ready",),  # only a learner that went back brings a trained group back
    "dropped": (),
}
_ACTIVE = ("issued", "generating", "ready", "leased")
_MOST_TOLD = 20


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the run that the promises depend on."""

    groups_per_step: int
    max_staleness_versions: int
    over_age: Literal["drop", "mask"]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what was found wrong, at most 20 sentences."""

    num_groups: int
    num_transitions: int
    num_steps: int
    num_undone_steps: int
    problems: list[str]


def audit(connection: sqlite3.Connection, promise: Promise) -> Audit:
    """Reads everything once. The connection must show one moment (store_ledger.reading)."""
    checks = (_file, _histories, _order, _steps, _staleness, _stored)
    problems = [problem for check in checks for problem in check(connection, promise)]

    def count(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    return Audit(
        num_groups=count("SELECT count(*) FROM groups"),
        num_transitions=count("SELECT count(*) FROM transitions"),
        num_steps=count("SELECT count(*) FROM steps WHERE undone_s IS NULL"),
        num_undone_steps=count("SELECT count(*) FROM steps WHERE undone_s IS NOT NULL"),
        problems=problems[:_MOST_TOLD]
        + ([f"and {len(problems) - _MOST_TOLD} more"] if len(problems) > _MOST_TOLD else []),
    )


def _file(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    for (line,) in connection.execute("PRAGMA quick_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"


def _histories(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """Every change was allowed, admission kept its bound, and the histories end where the groups
    stand.
    """
    limit = (promise.max_staleness_versions + 1) * promise.groups_per_step
    states: dict[int, str] = {}
    attempts: dict[int, int] = {}
    num_active = 0
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
            num_active += (state in _ACTIVE) - (before in _ACTIVE)
        states[group_id], attempts[group_id] = state, attempt
    for group_id, state, attempt in connection.execute(
        "SELECT group_id, state, attempt FROM groups"
    ):
        if states.pop(group_id, None) != state or attempts[group_id] != attempt:
            yield (
                f"group {group_id} is {state}, attempt {attempt}, which is not where its history"
                " ends"
            )
    for group_id in states:
        yield f"group {group_id} has a history and is gone"


def _order(connection: sqlite3.Connection, _: Promise) -> Iterator[str]:
    """Group ids and the places of training prompts are counted without a gap."""
    positions = "coalesce(max(position), -1) + 1 FROM groups WHERE purpose='train'"
    for what, query in (
        ("group ids", "SELECT count(*), coalesce(max(group_id), -1) + 1 FROM groups"),
        ("places in the order of prompts", f"SELECT count(DISTINCT position), {positions}"),
        ("training groups", f"SELECT count(*), {positions}"),
    ):
        found, wanted = connection.execute(query).fetchone()
        if found != wanted:
            yield f"{found} {what} are stored, {wanted} were given"


def _steps(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """In the history that survives, each step trained its groups and each trained group has one
    step.
    """
    surviving = "FROM trained JOIN steps USING (step_id) WHERE undone_s IS NULL"
    versions = [
        row[0]
        for row in connection.execute(
            "SELECT version FROM steps WHERE undone_s IS NULL ORDER BY version"
        )
    ]
    if versions != list(range(1, len(versions) + 1)):
        yield (
            f"the surviving steps are not 1 to {len(versions)}:"
            f" {sorted(set(range(1, max(versions) + 1)) - set(versions))} are missing"
        )
    sizes = dict(connection.execute(f"SELECT version, count(*) {surviving} GROUP BY version"))
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
        whose = "no surviving step" if state == "trained" else "a surviving step"
        yield f"group {group_id} is {state}, but {whose} trained it"
    for group_id, version, train_version in connection.execute(
        "SELECT group_id, steps.version, train_version FROM groups JOIN trained USING (group_id)"
        " JOIN steps USING (step_id) WHERE undone_s IS NULL AND steps.version != train_version + 1"
    ):
        yield (
            f"group {group_id} was leased for version {train_version} and trained by step {version}"
        )


def _staleness(connection: sqlite3.Connection, promise: Promise) -> Iterator[str]:
    """No batch, of any history, held a group that was over age."""
    decisive = "oldest_version" if promise.over_age == "drop" else "newest_version"
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
    """What may still be trained has its trajectories; what was dropped has none."""
    needed = (
        "purpose='train' AND (state IN ('ready', 'leased') OR state='trained' AND train_version>="
        "(SELECT coalesce(max(value), 0) FROM meta WHERE key='forgotten_before'))"
    )
    for (group_id,) in connection.execute(
        f"SELECT group_id FROM groups WHERE {needed} AND group_id NOT IN (SELECT group_id FROM"
        " blobs)"
    ):
        yield f"the trajectories of group {group_id} are lost"
    for (group_id,) in connection.execute(
        "SELECT group_id FROM blobs WHERE group_id NOT IN (SELECT group_id FROM groups WHERE state"
        " IN ('ready', 'leased', 'trained'))"
    ):
        yield f"group {group_id} is not complete, yet trajectories of it are stored"
