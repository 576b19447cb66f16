"""The course of a run and its outcome, for those who look at it later.

`<run>/events.jsonl` has each start with the code that it runs, each end with its cause, and each
restart, silence, stall and alarm, in order. `<run>/state.json` has the outcome.
Invariant: the outcome can be written although the disk is full. Room for it is reserved while the
run starts; without it a run that failed because of a full disk would look like a killed run.
"""

import time
from pathlib import Path

import msgspec

from async_rl.core import records

EVENTS_FILE = "events.jsonl"
_FILE = "state.json"
_RESERVED = "state.reserved"
_RESERVED_BYTES = 4096
_CAUSE_CHARS = 800
"""A cause of this length fits into the reserved room, whatever JSON and UTF-8 make of it."""


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


def reserve_outcome(run_dir: Path) -> None:
    """Reserve the room for the outcome. Raises OSError."""
    # Written, not only allocated: a sparse file would have no room on a full disk.
    (run_dir / _RESERVED).write_bytes(b" " * _RESERVED_BYTES)


def write_outcome(run_dir: Path, *, outcome: str, step: int, cause: str) -> None:
    """Write the outcome of the run. Raises OSError if not even the reserved room can be used."""
    state = {"outcome": outcome, "step": step, "cause": cause, "ended_s": time.time()}
    reserved = run_dir / _RESERVED
    try:
        (run_dir / _FILE).write_bytes(msgspec.json.encode(state))
        reserved.unlink(missing_ok=True)
    except OSError:
        short = state | {"cause": cause[:_CAUSE_CHARS]}
        # In place: a new file, or a longer one, would need room that is not there.
        with reserved.open("r+b") as file:
            file.write(msgspec.json.encode(short).ljust(_RESERVED_BYTES))
        reserved.replace(run_dir / _FILE)
