"""Evidence that a starting process advances: it reads, writes, or its memory changes.

An engine that loads weights, compiles or captures graphs reports nothing while it does; its
processes are busy all the same. CPU time would be no evidence: a deadlock may spin.
"""

from __future__ import annotations

import contextlib

import psutil

PROGRESS = "progress_mb"
"""The gauge of a heartbeat."""
PROGRESS_MB = 16.0
"""A smaller change is none: heartbeats themselves read a few KB each."""


def moved_mb(process: psutil.Process) -> float:
    """Return MB that a process and its children have read, have written, and have in memory."""
    moved = 0
    for each in (process, *process.children(recursive=True)):
        # A child may end in between, or belong to another user.
        with contextlib.suppress(psutil.Error):
            counters = each.io_counters()
            moved += counters.read_chars + counters.write_chars + each.memory_info().rss
    return float(moved / 2**20)
