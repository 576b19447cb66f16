"""Adapters for other trainers, called by the real packages where they are installed, against a live
verifier. Each must score right programs 1, wrong ones 0, and must never score a program that could
not be judged.
"""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rewards_support import Served

from async_rl.adapters import openrlhf, trl, verifiers
from async_rl.adapters.grader import scores_of
from async_rl.core.errors import ConfigError, DataError, InfrastructureError, root_cause

RIGHT = "I add.\n```python\ndef add(a, b):\n    return a + b\n```\n"
HALF = "```python\ndef add(a, b):\n    return abs(a) + b\n```\n"
WRONG = "```python\ndef add(a, b):\n    return a - b - 1\n```\n"
RESPONSES = [RIGHT, HALF, WRONG, "no program", "```python\nno program either (\n```"]
SCORES = [1.0, 0.5, 0.0, 0.0, 0.0]
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 2) == 1"]
PAIRS = {"inputs": ["1\n2", "-1\n2"], "outputs": ["3", "1"], "fn_name": "add"}
SUM = "print(sum(map(int, input().split())))"
SUMS = {"inputs": ["1 2", "-1 2"], "outputs": ["3", "1"]}


@pytest.fixture(autouse=True)
def url(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ASYNC_RL_VERIFIER_URL", served.base)
    return served.base


def scores(*given: Any, **settings: Any) -> list[float]:
    return asyncio.run(scores_of(*given, **settings))


def of_each(score: Callable[[str], Awaitable[float]]) -> list[float]:
    """The scores of the responses, one after the other."""

    async def all_of_them() -> list[float]:
        return [await score(response) for response in RESPONSES]

    return asyncio.run(all_of_them())


LAYOUTS: list[dict[str, Any]] = [
    {"test_list": TESTS},
    {"tests": json.dumps([{"kind": "assert", "code": test} for test in TESTS])},
    {"input_output": json.dumps(PAIRS)},
    {"reward_model": {"ground_truth": json.dumps(PAIRS)}, "data_source": "code"},
]


def test_grader_reads_every_layout_of_tests() -> None:
    responses = RESPONSES * len(LAYOUTS)
    rows = [row for row in LAYOUTS for _ in RESPONSES]
    assert scores(responses, rows) == SCORES * len(LAYOUTS)
    words = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}
    assert scores(["#### 72", "#### 71"], [words, words]) == [1.0, 0.0]


def test_a_program_that_cannot_be_judged_is_never_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "http://127.0.0.1:1"
    with pytest.raises(ExceptionGroup) as raised:
        scores([RIGHT], [{"test_list": TESTS}], url=f"{nowhere}/token/SECRET", timeout_s=0.3)
    cause = root_cause(raised.value)
    assert isinstance(cause, InfrastructureError)
    assert nowhere in str(cause)
    assert "SECRET" not in str(cause)
    for row in ({"prompt": "no tests"}, {"test_list": ["assert add(1, 2) = 3"]}):
        with pytest.raises(ExceptionGroup) as raised:
            scores([RIGHT], [row])
        assert isinstance(root_cause(raised.value), DataError)
    monkeypatch.delenv("ASYNC_RL_VERIFIER_URL")
    with pytest.raises(ConfigError, match="ASYNC_RL_VERIFIER_URL is not set"):
        scores([], [])


def test_verl_loads_the_custom_reward_function_by_its_name() -> None:
    reward = pytest.importorskip("verl.trainer.ppo.reward")
    from omegaconf import OmegaConf

    where = {"path": "pkg://async_rl.adapters.verl", "name": "compute_score", "reward_kwargs": {}}
    config = OmegaConf.create({"reward": {"custom_reward_function": where}})
    function = reward.get_custom_reward_fn(config)
    given = {"data_source": "code", "ground_truth": json.dumps(PAIRS), "extra_info": {"index": 0}}

    assert of_each(lambda response: function(solution_str=response, **given)) == SCORES


def test_verl_scores_by_its_own_client_of_sandbox_fusion(url: str) -> None:
    fusion = pytest.importorskip("verl.utils.reward_score.sandbox_fusion")

    def score(program: str, tests: dict[str, Any]) -> float:
        completion = f"```python\n{program}\n```"
        found, _ = fusion.compute_score(f"{url}/run_code", None, 512, completion, tests)
        return float(found)

    assert score(SUM, SUMS) == 1.0
    assert score("print(3)", SUMS) == 0.5
    assert score("def add(a, b):\n    return a + b", PAIRS) == 1.0
    assert score("def add(a, b):\n    return 1 // 0", PAIRS) == 0.0


def test_trl_reads_chats_and_gives_none_where_nothing_could_be_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    assert trainer.is_async_callable(trl.passed_tests)
    num = len(RESPONSES)
    columns: dict[str, Any] = {"test_list": [TESTS] * num, "trainer_state": None}
    columns |= {"prompts": ["p"] * num, "completion_ids": [[1]] * num}
    chat = [[{"role": "assistant", "content": response}] for response in RESPONSES]
    assert asyncio.run(trl.passed_tests(completions=RESPONSES, **columns)) == SCORES
    assert asyncio.run(trl.passed_tests(completions=chat, **columns)) == SCORES
    away = functools.partial(scores_of, url="http://127.0.0.1:1", timeout_s=0.3)
    monkeypatch.setattr(trl, "scores_of", away)
    assert asyncio.run(trl.passed_tests(completions=chat, **columns)) == [None] * num


def test_verifiers_task_scores_a_trace() -> None:
    vf = pytest.importorskip("verifiers.v1")

    class Data(vf.TaskData):  # type: ignore[misc, name-defined]
        test_list: list[str]

    class Task(vf.Task[Data]):  # type: ignore[misc, name-defined]
        passed_tests = vf.reward(weight=2.0)(verifiers.passed_tests)

    task = Task(Data(prompt="add", test_list=TESTS))
    assert [function.__name__ for function in task.hooks("reward")] == ["passed_tests"]
    found = of_each(lambda response: task.passed_tests(SimpleNamespace(last_reply=response)))
    assert found == SCORES


def test_openrlhf_executor_receives_rewards() -> None:
    agent = pytest.importorskip("openrlhf.utils.agent")
    fetch = agent.SingleTurnAgentExecutor(str(openrlhf.__file__))._fetch_rewards_via_func
    label = json.dumps({"test_list": TESTS})

    async def score(text: str) -> float:
        (found,) = await fetch([f"add {text}"], ["add "], [label])
        return float(found["rewards"][0])

    assert of_each(score) == SCORES


def gym() -> Any:
    return pytest.importorskip("async_rl.adapters.reasoning_gym")


@pytest.mark.parametrize("name", ["letter_counting", "countdown"])
def test_generators_of_reasoning_gym_score_their_own_answers(name: str) -> None:
    for row in gym().rows(name, 3, seed=7):
        right = row["reasoning_gym"]["entry"]["answer"]
        for response, least, most in (
            (f"I think.\n<answer>0</answer> No: <answer> {right} </answer>", 1.0, 1.0),
            (right, 1.0, 1.0),
            ("<answer>nothing of this</answer>", 0.0, 0.05),
        ):
            sample = SimpleNamespace(row=row, response=response)
            assert least <= gym().score(sample) <= most, (row["prompt"], response)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("letters", {}, "Dataset 'letters' not registered"),
        ("n_queens", {}, "evaluates each answer as Python"),
        ("countdown", {"most": 3}, "unexpected keyword argument 'most'"),
    ],
)
def test_a_generator_or_setting_that_reasoning_gym_lacks_is_named(
    name: str, settings: dict[str, int], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        gym().rows(name, 1, **settings)


@pytest.mark.parametrize("answer", ["[open(PATH,'w')]", "().__class__", "9**9**9"])
def test_no_answer_is_executed(answer: str, tmp_path: Path) -> None:
    (row,) = gym().rows("binary_matrix", 1, seed=7)
    response = f"<answer>{answer.replace('PATH', repr(str(tmp_path / 'written')))}</answer>"
    assert gym().score(SimpleNamespace(row=row, response=response)) == 0.0
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("name", ["prime_factorization", "game_of_life"])
def test_text_that_a_check_cannot_read_scores_0_and_is_no_failure(name: str) -> None:
    (row,) = gym().rows(name, 1, seed=7)
    for answer in ("no number", "{}", "9" * 400, "[[1, 2], [3]]", "\0"):
        assert 0 <= gym().score(SimpleNamespace(row=row, response=answer)) <= 0.05
