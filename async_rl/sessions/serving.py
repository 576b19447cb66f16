"""How long a server of sessions keeps idle connections, and how rarely it collects garbage."""

from __future__ import annotations

import gc

KEEP_ALIVE_S = 600
"""Agents think and run tools between calls. uvicorn's 5 s would close their connections just as
they send the next call, which the client then has to repeat.
"""
# A full collection visits all that the open sessions hold: 50 to 160 ms of CPU time for 1,000 of
# them, while no call advances, and by Python's default every ten seconds at 80 calls per second.
# It then frees a few hundred objects per call, so it may come twenty times more rarely.
_YOUNG_PER_FULL = 1000
# By Python's default a collection of young objects visits ten times the newest ones: 20 to 74 ms,
# every three seconds, which were the slowest calls. Two times as many take as long in all, in
# shorter pauses.
_NEWEST_PER_YOUNG = 1


def spare_heap() -> None:
    """Exempt the present objects from garbage collections, and search all later ones rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _NEWEST_PER_YOUNG, _YOUNG_PER_FULL)
