"""From a response to a score: its program or its words are verified, functions are asked, the
weighted sum is the reward.

Raises InfrastructureError when a response could not be judged, RewardError when a function failed;
a program that cannot be extracted or compiled is a failure of the policy.  Where no tests are run,
a sample counts as passed if its reward is at least reward.pass_reward. Called by the generator for
every finished sample.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from async_rl.config.plugins import short_name
from async_rl.config.reward_terms import TESTS, Term, terms_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, CodeTest, Prompt, Score, StepScore, Verdict
from async_rl.rewards.extraction import complete_blocks, extract_code
from async_rl.rewards.formats import is_well_formed
from async_rl.rewards.memo import Verifier
from async_rl.rewards.verifier.protocol import RewardSample

AskFunctions = Callable[
    [Sequence[str], RewardSample], Coroutine[Any, Any, dict[str, dict[str, float]]]
]
"""Of each function its parts, "score" among them."""

_SPECIAL = re.compile(r"[^\w.-]")
"""What a metric's name cannot hold."""


class Scorer:
    """Scores responses. ask_functions: None where the configuration names none."""

    def __init__(
        self, config: RunConfig, verifier: Verifier, ask_functions: AskFunctions | None = None
    ) -> None:
        self._reward, self._verifier, self._ask = config.reward, verifier, ask_functions

    async def score(
        self, prompt: Prompt, response_text: str, sample: Callable[[], RewardSample] | None = None
    ) -> Score:
        """Reward, parts and verdicts of one response. sample: makes what functions get. Raises
        InfrastructureError, RewardError.
        """
        terms = terms_of(self._reward, prompt.data_source)
        names = [term.function for term in terms if term.function != TESTS]
        if not names or self._ask is None or sample is None:
            return await self.score_by_tests(prompt, response_text)
        started = time.monotonic()
        judging = None
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask(names, sample()), name="ask reward functions")
            if len(names) < len(terms):
                judging = group.create_task(
                    self.score_by_tests(prompt, response_text), name="judge"
                )
        return self._combined(
            terms,
            asking.result(),
            None if judging is None else judging.result(),
            time.monotonic() - started,
        )

    async def score_by_tests(self, prompt: Prompt, response_text: str) -> Score:
        """The score of the row's own tests alone."""
        return await self._judge(
            prompt, response_text, extract_code(response_text, self._reward.extraction)
        )

    def _combined(
        self,
        terms: Sequence[Term],
        asked: dict[str, dict[str, float]],
        judged: Score | None,
        latency_s: float,
    ) -> Score:
        parts = {} if judged is None else {**judged.parts, TESTS: judged.reward}
        reward = 0.0
        for function, weight in terms:
            name = short_name(function)
            for part, value in asked.get(function, {}).items():
                parts[name if part == "score" else f"{name}.{_SPECIAL.sub('_', part)}"] = value
            reward += weight * parts[name]
        passed = Verdict.PASS if reward >= self._reward.pass_reward else Verdict.WRONG_ANSWER
        verdicts = (passed,) if judged is None else judged.verdicts
        return Score(reward=reward, parts=parts, verdicts=verdicts, latency_s=latency_s)

    async def score_steps(
        self,
        prompt: Prompt,
        response_text: str,
        *,
        num_tokens: int,
        tokens_until: Callable[[int], int],
    ) -> Score:
        """As `score`, with a score of each complete code block; the last one's is that of the
        response. Without a block it is one step.

        tokens_until: the number of tokens that so many characters need.
        """
        blocks = [] if prompt.problem.wants_words else complete_blocks(response_text)
        if not blocks:
            score = await self.score_by_tests(prompt, response_text)
            return msgspec.structs.replace(
                score, steps=(StepScore(end_tokens=num_tokens, reward=score.reward),)
            )
        async with asyncio.TaskGroup() as group:
            judging = [
                (end, group.create_task(self._judge(prompt, response_text, code)))
                for end, code in blocks
            ]
        steps = [
            StepScore(end_tokens=tokens_until(end), reward=task.result().reward)
            for end, task in judging
        ]
        return msgspec.structs.replace(judging[-1][1].result(), steps=tuple(steps))

    async def _judge(self, prompt: Prompt, text: str, code: str | None) -> Score:
        started = time.monotonic()
        verdicts = await self._verdicts(prompt, text, code)
        if Verdict.INFRASTRUCTURE_ERROR in verdicts:
            raise InfrastructureError(
                f"the verifier could not judge a response to prompt {prompt.prompt_id}"
            )
        passed = sum(verdict is Verdict.PASS for verdict in verdicts)
        fraction = passed / max(len(verdicts), len(prompt.problem.tests))
        share = fraction if self._reward.mode == "fraction" else float(fraction == 1.0)
        reward = self._reward.fail_reward + share * (
            self._reward.pass_reward - self._reward.fail_reward
        )
        parts = {"tests_passed": fraction, "compiles": float(Verdict.COMPILE_ERROR not in verdicts)}
        if self._reward.format_reward is not None:
            parts["format"] = float(is_well_formed(text))
            reward = self._reward.format_reward if share == 0 and parts["format"] else reward
        return Score(
            reward=reward,
            parts=parts,
            verdicts=tuple(verdicts),
            latency_s=time.monotonic() - started,
        )

    async def _verdicts(self, prompt: Prompt, text: str, code: str | None) -> list[Verdict]:
        """Answers are looked for in the whole text, everything else is asked of the program in it."""
        problem = prompt.problem
        answers: list[CodeTest] = [test for test in problem.tests if isinstance(test, AnswerTest)]
        if len(answers) == len(problem.tests):
            return await self._verifier.verify(problem, text)
        of_program = [Verdict.COMPILE_ERROR]
        if not answers:
            return of_program if code is None else await self._verifier.verify(problem, code)
        if code is not None:
            rest = [test for test in problem.tests if not isinstance(test, AnswerTest)]
            of_program = await self._verifier.verify(
                msgspec.structs.replace(problem, tests=rest), code
            )
        return [
            *await self._verifier.verify(msgspec.structs.replace(problem, tests=answers), text),
            *of_program,
        ]
