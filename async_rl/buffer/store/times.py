"""The times of the groups of a run, from its store: hand-out, generation, storing. Reads only."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading

# The last hand-out before the group was ready: earlier attempts failed without a result.
_TIMES = (
    "SELECT purpose, generator, (SELECT max(at_s) FROM transitions WHERE group_id=groups.group_id"
    " AND state='generating') AS handed_out_s, generation_s, (SELECT max(at_s) FROM transitions"
    " WHERE group_id=groups.group_id AND state='ready') AS ready_s, num_tokens, num_samples,"
    " coalesce(started_s, 0), coalesce(times, x'') FROM groups WHERE generation_s IS NOT NULL"
    " ORDER BY group_id DESC LIMIT ?"
)
_STEPS = "SELECT version, committed_s FROM steps WHERE undone_s IS NULL ORDER BY version"
_COLUMNS = 4
MOST_GROUPS = 20_000
"""Enough for the means of any run; a run of 10^7 groups would take minutes to read and to simulate.
"""


class GroupTimes(NamedTuple):
    """One finished group. Unix seconds of the buffer, except started_s, which is of the generator.

    generation_s: from its start to its last token. samples: float32 [N, 4] of each sample: response
    tokens, and seconds from started_s to first token (may be NaN), last token and score; N is 0 if
    they were not recorded.
    """

    purpose: str
    generator: str
    handed_out_s: float
    generation_s: float
    ready_s: float
    num_tokens: int
    num_samples: int
    started_s: float
    samples: npt.NDArray[np.float32]


def group_times(run_dir: Path, *, most: int = MOST_GROUPS) -> list[GroupTimes]:
    """Return the newest finished groups in the order of admission."""
    with reading(run_dir / STORE_FILE) as connection:
        rows = reversed(connection.execute(_TIMES, (most,)).fetchall())
    return [
        GroupTimes._make([*row[:-1], np.frombuffer(row[-1], "<f4").reshape(-1, _COLUMNS)])
        for row in rows
        # A compacted group has no transitions left.
        if None not in row
    ]


def clock_offsets(groups: Iterable[GroupTimes]) -> dict[str, tuple[float, float]]:
    """Return for each generator the seconds from its clock to the clock of the buffer, and
    the largest error of this number.
    """
    # A group starts after its hand-out and is stored after its last score, by whichever clock.
    least: dict[str, list[float]] = collections.defaultdict(list)
    most: dict[str, list[float]] = collections.defaultdict(list)
    for group in groups:
        if len(group.samples):
            scored_s = group.started_s + float(group.samples[:, -1].max())
            least[group.generator].append(group.handed_out_s - group.started_s)
            most[group.generator].append(group.ready_s - scored_s)
    return {
        # The middle of the interval that all groups allow; half its width is the error.
        name: ((max(least[name]) + min(most[name])) / 2, (min(most[name]) - max(least[name])) / 2)
        for name in least
    }


def step_times(run_dir: Path) -> tuple[dict[int, float], list[float]]:
    """Return the Unix time of each committed step, and of the start of each life of the learner."""
    with reading(run_dir / STORE_FILE) as connection:
        steps = {int(version): at_s for version, at_s in connection.execute(_STEPS)}
        return steps, [at_s for (at_s,) in connection.execute("SELECT started_s FROM lives")]
