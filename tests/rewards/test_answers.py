"""Answers in words: what each rule takes for right, and what becomes of a comparison that hangs or
fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from composing import compose
from rewards_support import Judging, no_sample, not_asked, passed, prompt_of, score_steps
from tables import table

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.responses import boxed, is_right
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.text_process import TextProcess


@pytest.fixture
async def answers() -> AsyncIterator[TextProcess]:
    it = TextProcess()
    yield it
    await it.close()


YES = AnswerTest(rule="exact", expected="yes")
FOREVER = AnswerTest(rule="regex", expected=r"^(a+)+$")
HARD = "a" * 60 + "b"


@pytest.mark.covers("rule by data_source: GSM8K")
@pytest.mark.covers("rule by data_source: MATH")
@pytest.mark.parametrize("case", table(__file__, "rules"), ids=lambda case: case["expected"])
def test_each_rule_takes_its_own_answers_for_right(case: dict[str, Any]) -> None:
    test = AnswerTest(rule=case["rule"], expected=case["expected"])
    answers = [*case["right"], *case["wrong"]]
    assert [text for text in answers if is_right(test, text)] == case["right"]


def test_braces_inside_a_box_are_balanced() -> None:
    assert boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} and \boxed{2") == "1"
    assert boxed("none") is None


async def test_a_comparison_that_never_ends_is_a_timeout_and_the_next_one_goes_on(
    answers: TextProcess,
) -> None:
    assert await answers.verdict(FOREVER, HARD, 0.2) is Verdict.TIMEOUT
    assert await answers.verdict(YES, "yes", 5) is Verdict.PASS
    assert await answers.verdict(YES, "no", 5) is Verdict.WRONG_ANSWER


async def test_a_rule_that_fails_is_an_infrastructure_error_and_never_a_verdict(
    answers: TextProcess,
) -> None:
    said = r"could not be compared by rule regex: (?:Pattern)?[Ee]rror: "
    with pytest.raises(InfrastructureError, match=said):
        await answers.verdict(AnswerTest(rule="regex", expected="("), "x", 5)


async def test_a_cancelled_comparison_leaves_no_answer_for_the_next_one(
    answers: TextProcess,
) -> None:
    assert await answers.verdict(YES, "yes", 5) is Verdict.PASS
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await answers.verdict(FOREVER, HARD, 30)
    assert await answers.verdict(YES, "no", 5) is Verdict.WRONG_ANSWER


@pytest.mark.parametrize(
    ("response", "reward"), [("```python\nprint(1)\n```\n#### 7", 2.0), ("#### 8", -1.0)]
)
def test_the_whole_response_is_scored_where_words_are_wanted(response: str, reward: float) -> None:
    ends = ["reward.pass_reward=2", "reward.fail_reward=-1", "reward.extraction=fenced"]
    prompt = prompt_of(AnswerTest(rule="gsm8k", expected="#### 7"), source="gsm8k")
    verifier = Judging(
        lambda _, test, text: passed(isinstance(test, AnswerTest) and is_right(test, text))
    )
    scorer = Scorer(compose("grpo_code", ends), verifier, not_asked)
    assert asyncio.run(scorer.score(prompt, response, no_sample)).reward == reward
    steps = score_steps(scorer, prompt, response).steps
    assert [(step.end_tokens, step.reward) for step in steps] == [(len(response) + 1, reward)]
