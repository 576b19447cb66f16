"""Answers in words: what each rule takes for right, and what becomes of a comparison that hangs or
fails.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from composing import compose
from rewards_support import results_with

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, CodeProblem, Prompt, Verdict
from async_rl.rewards.answers import boxed, is_right
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.protocol import TestResult


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as a plain function."""

    @functools.wraps(test)
    def plain(*args: object, **kwargs: object) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return plain


@asynccontextmanager
async def child() -> AsyncIterator[TextProcess]:
    it = TextProcess()
    try:
        yield it
    finally:
        await it.close()


@pytest.mark.covers("rule by data_source: GSM8K")
@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("She has 72 clips.\n#### 72", True),
        ("#### 72.0", True),
        ("#### $72", True),
        ("so it is 72", True),
        ("first 72, no: 71", False),
        ("#### 71\nor 72", False),
        ("#### -72", False),
        ("#### many", False),
        ("", False),
    ],
)
def test_gsm8k_compares_the_number_after_the_mark_or_the_last_one(
    response: str, right: bool
) -> None:
    assert (
        is_right(AnswerTest(rule="gsm8k", expected="48+24 = <<48+24=72>>72\n#### 72"), response)
        is right
    )


def test_gsm8k_reads_thousands_and_decimals() -> None:
    assert is_right(AnswerTest(rule="gsm8k", expected="#### 1,234"), "it is 1234")
    assert is_right(AnswerTest(rule="gsm8k", expected="0.5"), "#### .5")
    assert not is_right(AnswerTest(rule="gsm8k", expected="#### 1,234"), "it is 1.234")


@pytest.mark.covers("rule by data_source: MATH")
@pytest.mark.parametrize(
    ("expected", "response", "right"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", True),
        (r"so \boxed{\frac{1}{2}}", r"\boxed{\dfrac12}", True),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("2", r"first \boxed{2}, no: \boxed{3}", False),
        ("2", "it is 2", False),
        ("2", r"\boxed{2", False),
    ],
)
def test_math_compares_the_last_boxed_expression_as_mathematics(
    expected: str, response: str, right: bool
) -> None:
    assert is_right(AnswerTest(rule="math", expected=expected), response) is right


def test_braces_inside_a_box_are_balanced() -> None:
    assert boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} and \boxed{2") == "1"
    assert boxed("none") is None


def test_exact_compares_the_last_line_and_regex_searches() -> None:
    exact = AnswerTest(rule="exact", expected="Paris ")
    assert is_right(exact, "I think\n  Paris\n\n")
    assert not is_right(exact, "Paris\nor not")
    assert not is_right(exact, "")
    pattern = AnswerTest(rule="regex", expected=r"(?i)answer:\s*paris\b")
    assert is_right(pattern, "Answer: PARIS.")
    assert not is_right(pattern, "Answer: Parisian")


@in_a_loop
async def test_a_comparison_that_never_ends_is_a_timeout_and_the_next_one_goes_on() -> None:
    async with child() as answers:
        forever = AnswerTest(rule="regex", expected=r"^(a+)+$")
        assert await answers.verdict(forever, "a" * 60 + "b", 0.2) is Verdict.TIMEOUT
        right = AnswerTest(rule="exact", expected="yes")
        assert await answers.verdict(right, "yes", 5) is Verdict.PASS
        assert await answers.verdict(right, "no", 5) is Verdict.WRONG_ANSWER


@in_a_loop
async def test_a_rule_that_fails_is_an_infrastructure_error_and_never_a_verdict() -> None:
    async with child() as answers:
        with pytest.raises(
            InfrastructureError,
            match=r"could not be compared by rule regex: (?:Pattern)?[Ee]rror: ",
        ):
            await answers.verdict(AnswerTest(rule="regex", expected="("), "x", 5)


@in_a_loop
async def test_a_cancelled_comparison_leaves_no_answer_for_the_next_one() -> None:
    async with child() as answers:
        yes = AnswerTest(rule="exact", expected="yes")
        assert await answers.verdict(yes, "yes", 5) is Verdict.PASS
        hanging = asyncio.create_task(
            answers.verdict(AnswerTest(rule="regex", expected=r"^(a+)+$"), "a" * 60 + "b", 30)
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await hanging
        assert await answers.verdict(yes, "no", 5) is Verdict.WRONG_ANSWER


class ByRule:
    """A verifier that compares in this process."""

    async def verify(self, problem: CodeProblem, code: str) -> list[TestResult]:
        verdicts = [
            Verdict.PASS if is_right(test, code) else Verdict.WRONG_ANSWER
            for test in problem.tests
            if isinstance(test, AnswerTest)
        ]
        return results_with(*verdicts)


@pytest.mark.parametrize(
    ("response", "reward"), [("```python\nprint(1)\n```\n#### 7", 2.0), ("#### 8", -1.0)]
)
@in_a_loop
async def test_the_whole_response_is_scored_where_words_are_wanted(
    response: str, reward: float
) -> None:
    config = compose(
        "grpo_code", ["reward.pass_reward=2", "reward.fail_reward=-1", "reward.extraction=fenced"]
    )
    problem = CodeProblem(tests=[AnswerTest(rule="gsm8k", expected="#### 7")])
    prompt = Prompt(
        prompt_id="p",
        text="?",
        token_ids=np.zeros(1, np.int32),
        data_source="gsm8k",
        problem=problem,
    )
    scorer = Scorer(config, ByRule())
    assert (await scorer.score(prompt, response)).reward == reward
    steps = await scorer.score_steps(prompt, response, num_tokens=5, tokens_until=lambda _: 1)
    assert [(step.end_tokens, step.reward) for step in steps.steps] == [(5, reward)]


@pytest.mark.parametrize(
    ("expected", "response", "right"),
    [
        ("50", r"\boxed{50\%}", True),
        (r"50\%", r"\boxed{50}", True),
        (r"50\%", r"\boxed{50\%}", True),
        ("50", r"\boxed{5\%}", False),
        ("50", r"\boxed{5000\%}", False),
    ],
)
def test_a_percent_sign_may_be_left_out(expected: str, response: str, right: bool) -> None:
    assert is_right(AnswerTest(rule="math", expected=expected), response) is right
