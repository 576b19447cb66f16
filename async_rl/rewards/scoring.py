"""From a response to a score: the verifiers of the run judge its program or its words and call
functions, and the weighted sum is the reward.

Raises InfrastructureError if a response could not be judged, RewardError if a function failed. A
program that cannot be extracted or compiled is a failure of the policy. Without tests, a sample
counts as passed if its reward is at least reward.pass_reward.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from async_rl.config.rewards import TESTS
from async_rl.config.run import RunConfig
from async_rl.core.errors import BrokenTest, InfrastructureError, RewardError
from async_rl.core.types import AnswerTest, CodeProblem, Prompt, Score, StepScore, Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.memo import MAX_FAILURE_CHARS, Verifier
from async_rl.rewards.responses import complete_blocks, extract_code, is_well_formed
from async_rl.rewards.verifier.pool import VerifierPool
from async_rl.rewards.verifier.protocol import (
    SCORE,
    FunctionScores,
    RewardSample,
    TestResult,
    VerifyRequest,
)

AskFunctions = Callable[[Sequence[str], RewardSample], Coroutine[Any, Any, FunctionScores]]

PARAGRAPH_END = re.compile(r"\S\n[ \t]*\n")
_MOST_PARAGRAPHS = 64
"""Scored paragraphs of a response; each costs a call of every function."""
_SPECIAL = re.compile(r"[^\w.-]")
"""Characters that the name of a metric cannot contain."""


class Scorer:
    """Scores responses."""

    def __init__(self, config: RunConfig, verifier: Verifier, ask_functions: AskFunctions) -> None:
        self._reward = config.reward
        self._verifier = verifier
        self._ask = ask_functions

    async def score(
        self, prompt: Prompt, response_text: str, sample: Callable[[], RewardSample]
    ) -> Score:
        """Reward, parts and verdicts of one response.

        sample: makes the argument of functions. Raises InfrastructureError, RewardError.
        """
        terms = self._reward.terms_of(prompt.data_source)
        names = [term.function for term in terms if term.function != TESTS]
        if not names:
            return await self.score_by_tests(prompt, response_text)
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask(names, sample()), name="ask reward functions")
            judged = None
            # The tests are a term too; they run while the functions run.
            if len(names) < len(terms):
                judged = await self.score_by_tests(prompt, response_text)
        parts = {} if judged is None else {**judged.parts, TESTS: judged.reward}
        reward = 0.0
        for name, weight in terms:
            for part, value in asking.result().get(name, {}).items():
                parts[name if part == SCORE else f"{name}.{_SPECIAL.sub('_', part)}"] = value
            reward += weight * parts[name]
        # Without tests the reward decides, because an evaluation counts samples that passed.
        if judged is None:
            verdict = Verdict.PASS
            if reward < self._reward.pass_reward:
                verdict = Verdict.WRONG_ANSWER
            judged = Score(reward=reward, parts=parts, verdicts=(verdict,), latency_s=0.0)
        latency_s = time.monotonic() - started
        return replace(judged, reward=reward, parts=parts, latency_s=latency_s)

    async def score_by_tests(self, prompt: Prompt, response_text: str) -> Score:
        """The score by the row's own tests alone."""
        code = extract_code(response_text, self._reward.extraction, prompt.problem.language)
        return await self._judge(prompt, response_text, code)

    async def score_steps(
        self,
        prompt: Prompt,
        response_text: str,
        *,
        num_tokens: int,
        tokens_until: Callable[[int], int],
        sample: Callable[[], RewardSample],
    ) -> Score:
        """As `score`, with a score of each step: the response up to the end of each complete code
        block. Without a block, functions score each paragraph, and tests the response as one step.

        The score of the last step is the score of the response. tokens_until: maps a number of
        characters to the number of tokens that contain them.
        """
        blocks = []
        # An answer in words is one step, whatever blocks it contains.
        if not prompt.problem.wants_words:
            blocks = complete_blocks(response_text, prompt.problem.language)
        ends = {end: tokens_until(end) for end, _ in blocks}
        terms = self._reward.terms_of(prompt.data_source)
        if any(term.function != TESTS for term in terms):
            # Once, because a sample decodes the tokens of the whole response.
            whole = sample()
            if not ends:
                ends = {end: tokens_until(end) for end in _paragraph_ends(response_text)}
                ends[len(response_text)] = num_tokens
            scoring = [
                self.score(prompt, response_text[:end], partial(_until, whole, end, count))
                for end, count in ends.items()
            ]
        elif blocks:
            scoring = [self._judge(prompt, response_text, code) for _, code in blocks]
        else:
            ends = {len(response_text): num_tokens}
            scoring = [self.score_by_tests(prompt, response_text)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in scoring]
        steps = [
            StepScore(end_tokens=count, reward=task.result().reward)
            for count, task in zip(ends.values(), tasks, strict=True)
        ]
        return replace(tasks[-1].result(), steps=tuple(steps))

    async def _judge(self, prompt: Prompt, text: str, code: str | None) -> Score:
        started = time.monotonic()
        results = await self._results(prompt, text, code)
        verdicts = tuple(result.verdict for result in results)
        failures = (each.message for each in results if each.verdict is not Verdict.PASS)
        # Never a reward: the policy would be trained on a failure of the machine.
        if Verdict.INFRASTRUCTURE_ERROR in verdicts:
            raise InfrastructureError(
                f"the verifier could not judge a response to prompt {prompt.prompt_id}"
            )
        if Verdict.TEST_ERROR in verdicts:
            raise BrokenTest(
                f"a test of prompt {prompt.prompt_id} is broken, so no program can be scored by it;"
                " correct or remove the row (async-rl data check names the reason)"
            )
        reward = self._reward
        # Tests after the first failure may not have run; they count as failed.
        fraction = verdicts.count(Verdict.PASS) / max(len(verdicts), len(prompt.problem.tests))
        share = fraction if reward.mode == "fraction" else float(fraction == 1.0)
        value = reward.fail_reward + share * (reward.pass_reward - reward.fail_reward)
        parts = {"tests_passed": fraction}
        if not prompt.problem.wants_words:
            parts["compiles"] = float(Verdict.COMPILE_ERROR not in verdicts)
        if reward.format_reward is not None:
            is_formed = is_well_formed(text)
            parts["format"] = float(is_formed)
            if is_formed and share == 0:
                value = reward.format_reward
        return Score(
            reward=value,
            parts=parts,
            verdicts=verdicts,
            latency_s=time.monotonic() - started,
            failure=next(failures, "")[:MAX_FAILURE_CHARS],
        )

    async def _results(self, prompt: Prompt, text: str, code: str | None) -> list[TestResult]:
        """Results of answers, judged on the whole text, then of the other tests on the program."""
        problem = prompt.problem
        answers = [test for test in problem.tests if isinstance(test, AnswerTest)]
        others = [test for test in problem.tests if not isinstance(test, AnswerTest)]
        results: list[TestResult] = []
        if answers:
            results += await self._verifier.verify(replace(problem, tests=answers), text)
        if others and code is not None:
            results += await self._verifier.verify(replace(problem, tests=others), code)
        elif others:
            reason = "the response has no program"
            results.append(TestResult(verdict=Verdict.COMPILE_ERROR, message=reason))
        return results


def _paragraph_ends(text: str) -> list[int]:
    """The end positions of paragraphs, the end of the text last; evenly fewer of many."""
    # Without the blank end of the text, which would count as a further paragraph.
    ends = [match.start() + 1 for match in PARAGRAPH_END.finditer(text.rstrip())]
    stride = len(ends) // _MOST_PARAGRAPHS + 1
    return [*ends[stride - 1 :: stride], len(text)]


def _until(whole: RewardSample, end: int, num_tokens: int) -> RewardSample:
    """The sample as if the response had ended there."""
    return replace(
        whole,
        response=whole.response[:end],
        transcript=whole.transcript[:end],
        token_ids=whole.token_ids[:num_tokens],
        is_written=whole.is_written[:num_tokens],
    )


class Control:
    """Distinguishes an outage of scoring from a prompt that cannot be scored.

    After a failure, the newest sample that was scored is scored again, by the verifiers and
    functions themselves and not from the cache. If that fails too, the prompt is not the cause.
    scorer: without a memo.
    """

    def __init__(self, scorer: Scorer, *, limit_s: float) -> None:
        self._scorer = scorer
        self._limit_s = limit_s
        self._known: tuple[Prompt, str, Callable[[], RewardSample]] | None = None

    def remember(
        self, prompt: Prompt, response_text: str, sample: Callable[[], RewardSample]
    ) -> None:
        """This sample was scored."""
        self._known = prompt, response_text, sample

    async def is_outage(self) -> bool:
        """Return whether nothing can be scored now; True also while nothing has been scored yet."""
        # Without a sample that was ever scored, nothing shows that the prompt is the cause.
        if self._known is None:
            return True
        is_outage = False
        try:
            async with asyncio.timeout(self._limit_s):
                await self._scorer.score(*self._known)
        except* (InfrastructureError, RewardError, TimeoutError):
            is_outage = True
        return is_outage


class VerifierClient(VerifierPool):
    """The verifiers of a run, one client per generator process."""

    def __init__(self, config: RunConfig, token: str, activity: Activity | None = None) -> None:
        super().__init__(
            token,
            limit_s=config.timeouts.score_s,
            max_calls=config.reward.concurrency,
            activity=activity,
        )
        self._sandbox = config.sandbox
        # A reward that needs every test to pass is decided by the first that fails.
        self._stops = config.reward.mode == "all_or_nothing"

    async def verify(
        self, problem: CodeProblem, code: str, *, stops: bool = True
    ) -> list[TestResult]:
        """One result per test that ran. stops: at the first failure, if the reward needs every
        test. Raises InfrastructureError if no verifier could judge.
        """
        request = VerifyRequest(
            code=code,
            tests=problem.tests,
            language=problem.language,
            setup=problem.setup,
            timeout_s=self._sandbox.timeout_s,
            memory_mb=self._sandbox.memory_mb,
            stop_at_first_failure=stops and self._stops,
        )
        return (await self.answer(request)).tests

    async def ask_functions(self, functions: Sequence[str], sample: RewardSample) -> FunctionScores:
        """The parts of each function's score.

        Raises RewardError if a function failed, InfrastructureError if no verifier could run it.
        """
        request = VerifyRequest(code="", tests=[], functions=list(functions), sample=sample)
        return (await self.answer(request)).scores
