"""Settings of rollouts of several turns, and the agent that `rollout.fn` names.

Part of the schema in `run.py`, whose invariants hold here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from async_rl.config.base import PositiveInt, Section, Text, is_function
from async_rl.core.frozen import frozen

EXTERNAL = "external"
"""The value of rollout.fn that lets programs outside the run request sessions."""
JAIL = "jail"
"""The first word of a command that runs in a jail."""
SERVICE = "tinker"
"""The value of rollout.fn that makes the run a training service (docs/service.md)."""


@frozen
class Agent:
    """The program or the function that makes a sample, and the limits of its processes; neither of
    them if programs outside the run do.

    workers: processes of fn, each for many samples at a time, or of command at a time.
    is_jailed: the command runs in a jail. is_service:
    programs outside the run train, too.
    """

    command: Sequence[str] = ()
    fn: str | None = None
    workers: int = 0
    is_jailed: bool = False
    is_external: bool = False
    is_service: bool = False

    @property
    def name(self) -> str:
        """The name of its samples in status and metrics: of the function, or of the script."""
        scripts = [word for word in self.command if Path(word).suffix[1:].isalpha()]
        # The script says more than the interpreter that runs it.
        outside = SERVICE if self.is_service else EXTERNAL
        word = self.fn or [*scripts, *self.command, outside][0]
        return Path(word).name

    @property
    def is_used(self) -> bool:
        """Return whether agents make the samples."""
        return bool(self.command) or self.fn is not None or self.is_external or self.is_service


class RolloutConfig(Section):
    """The function that conducts a sample, and its number of turns."""

    fn: Text | Annotated[list[str], Field(min_length=1)] | None
    """async function that conducts the turns of a sample; a list = an agent that calls an endpoint:
    [program, argument, ...], with jail as the first word in a jail, or [function]; external =
    programs that the run does not start request sessions; tinker = such programs train too, by the
    Tinker API; null = one answer per sample"""
    max_turns: PositiveInt
    """largest number of turns of the policy in one sample"""

    @property
    def agent(self) -> Agent:
        """The agent of a run. A list of one function is called, any other list is a command."""
        if self.fn in (EXTERNAL, SERVICE):
            return Agent(is_external=self.fn == EXTERNAL, is_service=self.fn == SERVICE)
        words = self.fn if isinstance(self.fn, list) else []
        workers = os.cpu_count() or 1
        if len(words) == 1 and is_function(words[0]):
            return Agent(fn=words[0], workers=workers)
        is_jailed = words[:1] == [JAIL]
        return Agent(command=words[is_jailed:], workers=workers, is_jailed=is_jailed)
