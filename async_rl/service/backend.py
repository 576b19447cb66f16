"""What the front needs from the other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from async_rl.core.frozen import frozen
from async_rl.protocol.service import Execute, Executed, Position, Sample, Sampled


@frozen
class Model:
    """The base model. tokenizer: directory or name on the hub; most_rank: of an adapter."""

    name: str
    tokenizer: str
    vocab_size: int
    context_tokens: int
    most_rank: int


class Backend(Protocol):
    """The processes that compute."""

    async def position(self, run_id: str) -> Position:
        """Return the learner's state of a run, as soon as there is a learner."""

    async def execute(self, request: Execute) -> Executed:
        """Execute a request. Raises Unavailable if the learner has left since `position`."""

    async def release(self, run_id: str) -> None:
        """Save a run and free its memory."""

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences. Raises DataError for what the engine refuses."""

    async def load(self, policy: str, directory: Path, version: int) -> None:
        """Let all generators have these weights in the slot of in-flight samplers. Raises DataError
        if they have no free slot.
        """
