"""From a response to a score: extract the program, have it verified, turn the verdicts into a reward.

Raises InfrastructureError when the program could not be judged; a program that cannot be extracted or compiled is a failure of the policy.
Called by the generator for every finished sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from async_rl.config import RunConfig
from async_rl.errors import InfrastructureError
from async_rl.rewards.extraction import complete_blocks, extract_code
from async_rl.rewards.memo import Verifier
from async_rl.types import Prompt, Score, StepScore, Verdict


class CodeScorer:
    """Scores responses to programming prompts."""

    def __init__(self, config: RunConfig, verifier: Verifier) -> None:
        self._reward, self._verifier = config.reward, verifier

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward, parts and verdicts of one response. Raises InfrastructureError."""
        words = prompt.problem.wants_words
        return await self._judge(prompt, response_text if words else extract_code(response_text, self._reward.extraction))

    async def score_steps(self, prompt: Prompt, response_text: str, *, num_tokens: int, tokens_until: Callable[[int], int]) -> Score:
        """As `score`, with a score of each complete code block; the last one's is that of the response. Without a block it is one step.

        tokens_until: the number of tokens that so many characters need.
        """
        blocks = [] if prompt.problem.wants_words else complete_blocks(response_text)
        if not blocks:
            score = await self.score(prompt, response_text)
            return msgspec.structs.replace(score, steps=(StepScore(end_tokens=num_tokens, reward=score.reward),))
        async with asyncio.TaskGroup() as group:
            judging = [(end, group.create_task(self._judge(prompt, code))) for end, code in blocks]
        steps = [StepScore(end_tokens=tokens_until(end), reward=task.result().reward) for end, task in judging]
        return msgspec.structs.replace(judging[-1][1].result(), steps=tuple(steps))

    async def _judge(self, prompt: Prompt, code: str | None) -> Score:
        started = time.monotonic()
        verdicts = [Verdict.COMPILE_ERROR] if code is None else await self._verifier.verify(prompt.problem, code)
        if Verdict.INFRASTRUCTURE_ERROR in verdicts:
            raise InfrastructureError(f"the verifier could not judge a response to prompt {prompt.prompt_id}")
        passed = sum(verdict is Verdict.PASS for verdict in verdicts)
        fraction = passed / max(len(verdicts), len(prompt.problem.tests))
        share = fraction if self._reward.mode == "fraction" else float(fraction == 1.0)
        reward = self._reward.fail_reward + share * (self._reward.pass_reward - self._reward.fail_reward)
        parts = {"tests_passed": fraction, "compiles": float(Verdict.COMPILE_ERROR not in verdicts)}
        return Score(reward=reward, parts=parts, verdicts=tuple(verdicts), latency_s=time.monotonic() - started)
