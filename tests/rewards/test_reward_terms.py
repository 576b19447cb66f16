"""How the parts of a reward become one: weights, sources, the form of an answer, tests of several
kinds in one row.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from composing import compose
from rewards_support import Judging, passed, prompt_of, sample_of

from async_rl.config.plugins import REWARD, load_function
from async_rl.config.rewards import Part
from async_rl.core.errors import DataError
from async_rl.core.types import AnswerTest, CallTest, CodeProblem, CodeTest, Score, Verdict
from async_rl.data.problems import read_hidden
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.protocol import RewardSample

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


def score(
    text: str,
    *overrides: str,
    tests: Sequence[CodeTest] = (CALL,),
    source: str = "code",
    verifier: Judging | None = None,
) -> Score:
    scorer = Scorer(compose("grpo_code", list(overrides)), verifier or verifier_of_two(), ask)
    prompt = prompt_of(*tests, source=source)
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
    reward = compose("grpo_code", OWN).reward
    assert reward.terms_of("mine") == (Part("style", 1.0),)
    assert reward.functions == ("style",)


def test_a_row_of_answers_and_programs_asks_each_of_what_it_is_about() -> None:
    verifier = verifier_of_two()
    text = f"this is right\n```python\n{PROGRAM}\n```\n"
    assert score(text, tests=[WORDS, CALL], verifier=verifier).reward == 1.0
    assert verifier.asked == [(1, text), (1, PROGRAM + "\n")]
    assert score(text, tests=[CALL, WORDS]).reward == 1.0
    assert score(text.replace("right", "wrong"), tests=[CALL, WORDS]).reward == 0.0
    assert score(text.replace("def f", "def g"), tests=[WORDS, CALL]).reward == 0.0


@pytest.mark.covers("check_xml_format")
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (FORMED.format("right"), 1.0), ("right", 1.0), (FORMED.format("no"), -0.8), ("no", -1.0),
        ("<answer>no</answer><think>hm</think>", -1.0),
        (FORMED.format("<answer>no</answer>"), -1.0),
    ],
)  # fmt: skip
def test_the_form_changes_the_reward_of_wrong_answers_only(text: str, reward: float) -> None:
    ends = ("reward.fail_reward=-1", "reward.format_reward=-0.8")
    assert score(text, *ends, tests=[WORDS]).reward == reward
    assert score(text, ends[0], tests=[WORDS]).reward == (1.0 if "right" in text else -1.0)


ROW: dict[str, object] = {"prompt": "say something", "wanted": "yes", "data_source": "mine"}


def read_with(row: dict[str, object], *settings: str) -> CodeProblem:
    return read_hidden(row, compose("grpo_code", list(settings)))[0]


@pytest.mark.parametrize(
    "settings",
    [[], ["reward.terms.tests=tests", "reward.terms.length=length"], ["rollout.fn=my:rollout"]],
)
def test_a_row_without_tests_is_refused_where_tests_score_it(settings: list[str]) -> None:
    with pytest.raises(DataError, match="no tests among the columns"):
        read_with(ROW, *settings)


def test_a_row_without_tests_is_used_where_functions_or_agents_score_it_and_comes_along() -> None:
    for setting in (OWN[0], "rollout.fn=[my:agent]"):
        problem = read_with(ROW, setting)
        assert (problem.tests, json.loads(problem.row)) == ([], ROW)
    assert read_with(ROW, *OWN).tests == []
    with_tests: dict[str, object] = {**ROW, "tests": [msgspec.to_builtins(CALL)]}
    assert read_with(with_tests, "rollout.fn=my:rollout").row != ""
    assert read_with(with_tests).row == ""
    with pytest.raises(DataError, match="tests"):
        read_with({**ROW, "tests": "none"}, "rollout.fn=[my:agent]")


def test_a_function_of_a_file_is_found_wherever_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_task.py").write_text("def score(sample):\n    return 3\n")
    assert load_function("reward.fn", f"{tmp_path}/my_task.py:score", REWARD)(None) == 3
    monkeypatch.chdir(tmp_path)
    assert load_function("reward.fn", "my_task:score", REWARD)(None) == 3
