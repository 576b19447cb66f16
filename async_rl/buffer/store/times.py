"""The times of the groups of a run, from its store: hand-out, generation, storing. Reads only."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.buffer.store.ledger import reading

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
