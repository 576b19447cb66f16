"""The environment of agents, as `rollout.fn` names it. Pure."""

from __future__ import annotations

import os

from async_rl.config.plugins import is_function
from async_rl.config.rollout import RolloutConfig
from async_rl.core.frozen import frozen

_MEMORY_MB = 4096
"""Address space, of which Python with an SDK maps about 1 GB and uses a tenth."""


@frozen
class Agent:
    """The program or the function that makes a sample, and the limits of its processes.

    workers: processes of fn, each for many samples at a time, or of command at a time. memory_mb:
    MB of address space of each of them.
    """

    command: list[str]
    fn: str | None
    workers: int
    memory_mb: int = _MEMORY_MB

    @property
    def is_used(self) -> bool:
        """Return whether agents make the samples."""
        return bool(self.command) or self.fn is not None


def agent_of(rollout: RolloutConfig) -> Agent:
    """Return the agent of a run. A list of one function is called, any other list is a command."""
    words = rollout.fn if isinstance(rollout.fn, list) else []
    workers = os.cpu_count() or 1
    if len(words) == 1 and is_function(words[0]):
        return Agent(command=[], fn=words[0], workers=workers)
    return Agent(command=words, fn=None, workers=workers)
