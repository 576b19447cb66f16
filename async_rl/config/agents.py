"""The environment of agents, as `rollout.fn` names it. Pure."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.config.plugins import is_function
from async_rl.config.rollout import EXTERNAL, RolloutConfig
from async_rl.core.frozen import frozen

_MEMORY_MB = 4096
"""Address space. Python with an SDK maps about 1 GB and uses a tenth of it."""


@frozen
class Agent:
    """The program or the function that makes a sample, and the limits of its processes; neither of
    them if programs outside the run do.

    workers: processes of fn, each for many samples at a time, or of command at a time. memory_mb:
    MB of address space of each of them.
    """

    command: list[str]
    fn: str | None
    workers: int
    memory_mb: int = _MEMORY_MB
    is_external: bool = False

    @property
    def name(self) -> str:
        """The name of its samples in status and metrics: of the function, or of the script."""
        scripts = [word for word in self.command if Path(word).suffix[1:].isalpha()]
        # The script says more than the interpreter that runs it.
        word = self.fn or [*scripts, *self.command, EXTERNAL][0]
        return Path(word).name

    @property
    def is_used(self) -> bool:
        """Return whether agents make the samples."""
        return bool(self.command) or self.fn is not None or self.is_external


def agent_of(rollout: RolloutConfig) -> Agent:
    """Return the agent of a run. A list of one function is called, any other list is a command."""
    if rollout.fn == EXTERNAL:
        return Agent(command=[], fn=None, workers=0, is_external=True)
    words = rollout.fn if isinstance(rollout.fn, list) else []
    workers = os.cpu_count() or 1
    if len(words) == 1 and is_function(words[0]):
        return Agent(command=[], fn=words[0], workers=workers)
    return Agent(command=words, fn=None, workers=workers)
