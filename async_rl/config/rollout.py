"""Settings of rollouts of several turns.

Part of the schema in `run.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rl.config.base import PositiveInt, Section, Text

EXTERNAL = "external"
"""The value of rollout.fn that lets programs outside the run request sessions."""


class RolloutConfig(Section):
    """The function that conducts a sample, and its number of turns."""

    fn: Text | Annotated[list[str], Field(min_length=1)] | None
    """async function that conducts the turns of each sample: package.module:function or
    file.py:function; a list = an agent that calls an endpoint: [program, argument, ...], or
    [function] of (task, endpoint); external = programs that the run does not start request
    sessions; null = one answer per sample"""
    max_turns: PositiveInt
    """largest number of turns of the policy in one sample"""
