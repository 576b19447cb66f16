"""The events of a run, `<run>/events.jsonl`: each start with the code that it runs, each end with
its cause, and each restart, silence, stall and alarm, in order.
"""

import time
from pathlib import Path

import msgspec

from async_rl.core import records

EVENTS_FILE = "events.jsonl"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line. at_s: Unix time. kind: origin, start, restarts, silent, stalled, alarm, or the
    outcome of a run that ended. text: of origin, JSON.
    """

    at_s: float
    step: int
    kind: str
    text: str


def note(run_dir: Path, kind: str, text: str, *, step: int) -> None:
    """Add an event. Raises InfrastructureError if it cannot be written."""
    event = Event(at_s=time.time(), step=step, kind=kind, text=text)
    records.append(run_dir / EVENTS_FILE, [event])
