"""Settings of rollouts that take several turns.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rl.config.base import Section


class RolloutConfig(Section):
    """Who decides what a sample consists of."""

    fn: Annotated[str, Field(min_length=1)] | None
    """package.module:function or file.py:function, async, that leads each sample; null = one answer
    and no more"""
    max_turns: Annotated[int, Field(ge=1)]
    """times the policy may write in one sample"""
