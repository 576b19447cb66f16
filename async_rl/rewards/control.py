"""The control sample: distinguishes an outage of scoring from a prompt that cannot be scored.

After a failure, the newest sample that was scored is scored again, by the verifiers and functions
themselves and not from the cache. If that fails too, the prompt is not the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from async_rl.core.errors import InfrastructureError, RewardError
from async_rl.core.types import Prompt
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.protocol import RewardSample


class Control:
    """The newest scored sample of one generator. scorer: without a memo."""

    def __init__(self, scorer: Scorer, *, limit_s: float) -> None:
        self._scorer = scorer
        self._limit_s = limit_s
        self._known: tuple[Prompt, str, Callable[[], RewardSample]] | None = None

    async def close(self) -> None:
        """End the process that extracts programs."""
        await self._scorer.close()

    def remember(
        self, prompt: Prompt, response_text: str, sample: Callable[[], RewardSample]
    ) -> None:
        """This sample was scored."""
        self._known = prompt, response_text, sample

    async def is_outage(self) -> bool:
        """Return whether nothing can be scored now; True also while nothing has been scored yet."""
        if self._known is None:
            return True
        is_outage = False
        try:
            async with asyncio.timeout(self._limit_s):
                await self._scorer.score(*self._known)
        except* (InfrastructureError, RewardError, TimeoutError):
            is_outage = True
        return is_outage
