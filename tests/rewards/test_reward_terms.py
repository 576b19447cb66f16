"""How the parts of a reward become one: weights, sources, the form of an answer, tests of several
kinds in one row, and scores of steps.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from composing import compose
from rewards_support import (
    Judging,
    calls,
    not_asked,
    passed,
    prompt_of,
    sample_of,
    score_steps,
)  # fmt: skip

from async_rl.core.errors import DataError
from async_rl.core.types import (
    AnswerTest,
    CallTest,
    CodeProblem,
    CodeTest,
    Score,
    StepScore,
    Verdict,
)
from async_rl.data.drafts import read_hidden
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.protocol import FunctionScores, RewardSample

PROGRAM = "def f(x):\n    return x"
CALL = CallTest(function="f", args=[1], expected=1)
WORDS = AnswerTest(rule="regex", expected="right")


def verifier_of_two() -> Judging:
    """A program passes if it defines f, words pass if they hold "right"."""
    return Judging(
        lambda _, test, text: passed(("right" if isinstance(test, AnswerTest) else "def f") in text)
    )


async def ask(functions: Sequence[str], sample: RewardSample) -> dict[str, dict[str, float]]:
    scores = {"style": {"score": 0.5, "to/ne": 2.0}, "length": {"score": 0.25}}
    return {function: scores[function] for function in functions}


def score(text: str, *overrides: str, tests: Sequence[CodeTest] = (CALL,), **more: Any) -> Score:
    """The score by a verifier of two kinds, or by `verifier`, of a prompt of `source`."""
    verifier = more.get("verifier") or verifier_of_two()
    scorer = Scorer(compose("grpo_code", list(overrides)), verifier, ask)
    prompt = prompt_of(*tests, source=more.get("source", "code"))
    return asyncio.run(scorer.score(prompt, text, lambda: sample_of("")))


THREE = (
    "reward.terms.tests=tests",
    "reward.terms.style=my:style",
    "reward.terms.length=length",
    "reward.terms.length.weight=-1",
)
FORMED = "<think>hm</think>\n<answer>{}</answer>"
OWN = ["reward.terms.style=my:style", "reward.terms.style.sources=[mine]"]


@pytest.mark.covers("rule and model scores with weights")
def test_the_reward_is_the_weighted_sum_and_every_part_has_its_name() -> None:
    found = score(PROGRAM, *THREE, "reward.terms.style.weight=2")
    assert found.reward == 1.0 + 2 * 0.5 - 0.25
    style = {"style": 0.5, "style.to_ne": 2.0}
    assert found.parts == {"tests_passed": 1, "compiles": 1, "tests": 1, **style, "length": 0.25}
    assert found.verdicts == (Verdict.PASS,)
    assert score(PROGRAM, *THREE, "reward.terms.style.weight=0").reward == 0.75


@pytest.mark.covers("rule by data_source: module:function")
def test_a_function_may_score_alone_and_no_test_is_run() -> None:
    verifier = verifier_of_two()
    found = score(PROGRAM, OWN[0], verifier=verifier)
    assert (found.reward, found.verdicts, verifier.asked) == (0.5, (Verdict.WRONG_ANSWER,), [])
    # without tests a sample passes with reward.pass_reward
    assert score(PROGRAM, OWN[0], "reward.pass_reward=0.5").verdicts == (Verdict.PASS,)
    # for the data sources that the term names
    assert score(PROGRAM, *OWN, source="mine").reward == 0.5
    assert score(PROGRAM, *OWN, source="other").reward == 1.0


def test_a_row_of_answers_and_programs_asks_each_of_what_it_is_about() -> None:
    verifier = verifier_of_two()
    text = f"this is right\n```python\n{PROGRAM}\n```\n"
    assert score(text, tests=[WORDS, CALL], verifier=verifier).reward == 1.0
    assert verifier.asked == [(1, text), (1, PROGRAM + "\n")]
    assert score(text, tests=[CALL, WORDS]).reward == 1.0
    assert score(text.replace("right", "wrong"), tests=[CALL, WORDS]).reward == 0.0
    assert score(text.replace("def f", "def g"), tests=[WORDS, CALL]).reward == 0.0


@pytest.mark.covers("check_xml_format")
def test_the_form_changes_the_reward_of_wrong_answers_only() -> None:
    ends = ("reward.fail_reward=-1", "reward.format_reward=-0.8")
    for text, reward in (
        (FORMED.format("right"), 1.0), ("right", 1.0), (FORMED.format("no"), -0.8), ("no", -1.0),
        ("<answer>no</answer><think>hm</think>", -1.0),
        (FORMED.format("<answer>no</answer>"), -1.0),
    ):  # fmt: skip
        assert score(text, *ends, tests=[WORDS]).reward == reward
    assert score(FORMED.format("no"), ends[0], tests=[WORDS]).reward == -1.0


ROW: dict[str, object] = {"prompt": "say something", "wanted": "yes", "data_source": "mine"}


def read_with(row: dict[str, object], *settings: str) -> CodeProblem:
    return read_hidden(row, compose("grpo_code", list(settings)))[0]


def test_a_row_without_tests_is_used_only_where_functions_or_agents_score_it() -> None:
    for settings in ([], [THREE[0], THREE[2]], ["rollout.fn=my:rollout"]):
        with pytest.raises(DataError, match="no tests among the columns"):
            read_with(ROW, *settings)
    for setting in (OWN[0], "rollout.fn=[my:agent]"):
        problem = read_with(ROW, setting)
        assert (problem.tests, json.loads(problem.row)) == ([], ROW)
    assert read_with(ROW, *OWN).tests == []
    with_tests: dict[str, object] = {**ROW, "tests": [msgspec.to_builtins(CALL)]}
    assert read_with(with_tests, "rollout.fn=my:rollout").row != ""
    assert read_with(with_tests).row == ""


PROMPT = prompt_of(*calls(0, 1, 2, 3))


def counts_passes() -> Judging:
    """A program passes as many tests as it has the letter x."""
    return Judging(lambda number, _, code: passed(number < code.count("x")))


def block(program: str) -> str:
    return f"```python\n{program}\n```"


FIRST, SECOND = block("answer = 'x' + 'one long line'"), block("answer = 'xxx' + 'one long line'")


def score_blocks(response: str) -> Score:
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
    found = score_blocks(f"{second}\ndone")
    assert found.steps == (
        StepScore(end_tokens=len(first), reward=0.25),
        StepScore(end_tokens=len(second), reward=0.75),
    )
    assert found.reward == 0.75
    # A block that does not parse or is not closed is no step.
    no_program, opened = block("this is not a program at all"), SECOND.removesuffix("```")
    found = score_blocks(f"{FIRST}\n{no_program}\n{opened}")
    assert [step.reward for step in found.steps] == [0.25]
    # A response without blocks is one step at its last token, as an answer in words with blocks.
    assert score_blocks("xx = 1").steps == (StepScore(end_tokens=7, reward=0.5),)
    scorer = Scorer(compose("grpo_code"), verifier_of_two(), not_asked)
    whole = StepScore(end_tokens=len(FIRST) + 7, reward=1)
    assert score_steps(scorer, prompt_of(WORDS), f"{FIRST}\nright").steps == (whole,)
