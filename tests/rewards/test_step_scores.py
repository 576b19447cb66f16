from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from composing import compose
from rewards_support import no_sample, not_asked, results_with

from async_rl.config.run import RunConfig
from async_rl.core.types import CallTest, CodeProblem, Prompt, Score, StepScore, Verdict
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.protocol import FunctionScores, RewardSample, TestResult

TESTS = [CallTest(function="f", args=[i], expected=i) for i in range(4)]
PROMPT = Prompt(
    prompt_id="p",
    text="",
    token_ids=np.zeros(1, np.int32),
    data_source="code",
    problem=CodeProblem(tests=list(TESTS)),
)
CONFIG: RunConfig = compose("grpo_code", ["reward.mode=fraction", "reward.placement=steps"])


class CountsPasses:
    """Says that a program passes as many tests as it has the letter x."""

    async def verify(self, problem: CodeProblem, code: str) -> list[TestResult]:
        passed = code.count("x")
        verdicts = [
            Verdict.PASS if i < passed else Verdict.WRONG_ANSWER for i in range(len(problem.tests))
        ]
        return results_with(*verdicts)


def block(program: str) -> str:
    return f"```python\n{program}\n```"


def score(response: str) -> Score:
    """One token per character."""
    scorer = Scorer(CONFIG, CountsPasses(), not_asked)
    return asyncio.run(
        scorer.score_steps(
            PROMPT,
            response,
            num_tokens=len(response) + 1,
            tokens_until=lambda chars: chars,
            sample=no_sample,
        )
    )


def score_by_function(response: str, *settings: str) -> tuple[Score, list[RewardSample]]:
    """The function counts letters x of what it is shown."""
    terms = ["reward.placement=steps", "reward.terms.mine=length", *settings]
    config = compose("grpo_code", terms)
    asked: list[RewardSample] = []

    async def ask(names: Sequence[str], sample: RewardSample) -> FunctionScores:
        asked.append(sample)
        return {"mine": {"score": float(sample.response.count("x"))}}

    whole = RewardSample(
        prompt_id="p", prompt="", response=response, transcript=response,
        token_ids=list(range(len(response) + 1)), is_written=[True] * (len(response) + 1),
        data_source="code", row={}, tests=[], setup="", is_truncated=False, max_tokens=999,
    )  # fmt: skip
    scorer = Scorer(config, CountsPasses(), ask)
    found = asyncio.run(
        scorer.score_steps(
            PROMPT,
            response,
            num_tokens=len(response) + 1,
            tokens_until=lambda chars: chars,
            sample=lambda: whole,
        )
    )
    return found, asked


@pytest.mark.covers("dense: a score per step by a function")
def test_a_function_scores_the_response_up_to_the_end_of_each_block() -> None:
    response = f"x\n{FIRST}\nbetter:\n{SECOND}\ndone"
    found, asked = score_by_function(response)
    ends = [response.index(part) + len(part) for part in (FIRST, SECOND)]
    assert [(step.end_tokens, step.reward) for step in found.steps] == [(ends[0], 2), (ends[1], 5)]
    assert found.reward == 5
    assert [len(sample.token_ids) for sample in asked] == ends
    assert [sample.response for sample in asked] == [response[:end] for end in ends]


def test_tests_beside_a_function_judge_the_block_of_the_step() -> None:
    settings = ("reward.mode=fraction", "reward.terms.tests=tests")
    found, _ = score_by_function(f"{FIRST}\n{SECOND}", *settings)
    assert [step.reward for step in found.steps] == [1 + 0.25, 4 + 0.75]


def test_without_a_block_a_function_scores_each_paragraph() -> None:
    found, asked = score_by_function("x y\n\nxx\nx\n \nno\n\n")
    assert [sample.response for sample in asked] == [
        "x y",
        "x y\n\nxx\nx",
        "x y\n\nxx\nx\n \nno\n\n",
    ]
    assert [step.reward for step in found.steps] == [1, 4, 4]
    assert found.steps[-1].end_tokens == len("x y\n\nxx\nx\n \nno\n\n") + 1


def test_of_many_paragraphs_some_are_scored() -> None:
    found, asked = score_by_function("x\n\n" * 1000)
    assert len(asked) == len(found.steps) <= 65
    assert found.steps[-1].reward == 1000


FIRST, SECOND = block("answer = 'x' + 'one long line'"), block("answer = 'xxx' + 'one long line'")


@pytest.mark.covers("dense: a score per block")
def test_each_complete_block_is_a_step_scored_by_the_tests_that_it_passes() -> None:
    found = score(f"First try:\n{FIRST}\nbetter:\n{SECOND}\ndone")
    first_end, second_end = (
        len(f"First try:\n{FIRST}"),
        len(f"First try:\n{FIRST}\nbetter:\n{SECOND}"),
    )
    assert found.steps == (
        StepScore(end_tokens=first_end, reward=0.25),
        StepScore(end_tokens=second_end, reward=0.75),
    )
    assert found.reward == 0.75


def test_a_block_that_does_not_parse_or_is_not_closed_is_no_step() -> None:
    found = score(
        f"{FIRST}\n{block('this is not a program at all')}\n```python\nanswer = 'xxxx' + 'one long"
        " line'"
    )
    assert [step.reward for step in found.steps] == [0.25]


def test_a_response_without_blocks_is_one_step_at_its_last_token() -> None:
    assert score("xx = 1").steps == (StepScore(end_tokens=7, reward=0.5),)
