from __future__ import annotations

from collections.abc import Sequence

import pytest
from composing import compose
from rewards_support import Judging, calls, not_asked, passed, prompt_of, sample_of, score_steps

from async_rl.core.types import Score, StepScore
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.protocol import FunctionScores, RewardSample

PROMPT = prompt_of(*calls(0, 1, 2, 3))


def counts_passes() -> Judging:
    """A program passes as many tests as it has the letter x."""
    return Judging(lambda number, _, code: passed(number < code.count("x")))


def block(program: str) -> str:
    return f"```python\n{program}\n```"


FIRST, SECOND = block("answer = 'x' + 'one long line'"), block("answer = 'xxx' + 'one long line'")


def score(response: str) -> Score:
    config = compose("grpo_code", ["reward.mode=fraction", "reward.placement=steps"])
    return score_steps(Scorer(config, counts_passes(), not_asked), PROMPT, response)


def score_by_function(response: str, *settings: str) -> tuple[Score, list[RewardSample]]:
    """The function counts letters x of what it is shown."""
    terms = ["reward.placement=steps", "reward.terms.mine=length", *settings]
    asked: list[RewardSample] = []

    async def ask(names: Sequence[str], sample: RewardSample) -> FunctionScores:
        asked.append(sample)
        return {"mine": {"score": float(sample.response.count("x"))}}

    scorer = Scorer(compose("grpo_code", terms), counts_passes(), ask)
    whole = sample_of(response, len(response) + 1)
    return score_steps(scorer, PROMPT, response, lambda: whole), asked


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


def test_without_a_block_a_function_scores_each_paragraph_or_some_of_many() -> None:
    response = "x y\n\nxx\nx\n \nno\n\n"
    found, asked = score_by_function(response)
    assert [sample.response for sample in asked] == ["x y", "x y\n\nxx\nx", response]
    assert [step.reward for step in found.steps] == [1, 4, 4]
    assert found.steps[-1].end_tokens == len(response) + 1
    found, asked = score_by_function("x\n\n" * 1000)
    assert len(asked) == len(found.steps) <= 65
    assert found.steps[-1].reward == 1000


@pytest.mark.covers("dense: a score per block")
def test_each_complete_block_is_a_step_scored_by_the_tests_that_it_passes() -> None:
    first = f"First try:\n{FIRST}"
    second = f"{first}\nbetter:\n{SECOND}"
    found = score(f"{second}\ndone")
    assert found.steps == (
        StepScore(end_tokens=len(first), reward=0.25),
        StepScore(end_tokens=len(second), reward=0.75),
    )
    assert found.reward == 0.75
    # A block that does not parse or is not closed is no step.
    no_program, opened = block("this is not a program at all"), SECOND.removesuffix("```")
    assert [step.reward for step in score(f"{FIRST}\n{no_program}\n{opened}").steps] == [0.25]
    # A response without blocks is one step at its last token.
    assert score("xx = 1").steps == (StepScore(end_tokens=7, reward=0.5),)
