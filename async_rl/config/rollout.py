"""Settings of rollouts that take several turns.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from async_rl.config.base import Section


class RolloutConfig(Section):
    """Who decides what a sample consists of."""

    fn: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description=(
                "package.module:function or file.py:function, async, that leads each sample; null ="
                " one answer and no more"
            )
        ),
    ]
    max_turns: Annotated[int, Meta(ge=1, description="times the policy may write in one sample")]
