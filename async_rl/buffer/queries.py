"""Questions about the state of the buffer: what may be handed out, and why a request must wait.

They change nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from async_rl.buffer.state import BufferState
from async_rl.core.types import GroupState, Purpose


def num_free(state: BufferState, purpose: Purpose, now_s: float) -> int:
    """Return how many tickets of this purpose could be handed out now, at most."""
    return state.outage.num_allowed(
        state.admission.num_free(purpose),
        is_generating=bool(state.admission.generators()),
        now_s=now_s,
    )


def refusal(state: BufferState, version: int, purposes: Collection[Purpose]) -> str:
    """Return why a generator at this version gets no ticket, or an empty string."""
    # An outage first: it is the reason on which a person can act.
    return state.outage.refusal or state.admission.refusal(version, purposes)


def is_evaluating(state: BufferState) -> bool:
    """Return whether a generator works on an evaluation."""
    return any(
        group.purpose is Purpose.EVAL and group.state is GroupState.GENERATING
        for group in state.admission.open.values()
    )


def queue(state: BufferState) -> dict[str, int]:
    """Return the current number of training groups in each state."""
    num_generating = state.admission.num_generating
    return {
        "issued": state.admission.num_training - num_generating,
        "generating": num_generating,
        "ready": len(state.replay.ready),
        "leased": state.replay.num_leased,
    }
