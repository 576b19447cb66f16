"""Held-out evaluations as the buffer opens and reports them, with their figures against slow
re-computations; its state as people see it.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
from buffer_support import (
    FakePrompts,
    evaluate,
    fail,
    make_config,
    make_trajectory,
    opened,
    put,
    tickets,
)
from composing import compose

from async_rl.buffer.evaluation import evaluation_scalars, report_of, result_of
from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import KEPT_SAMPLES
from async_rl.config.base import replace
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import NO_VERSION, AnswerTest, AssertTest, CodeProblem, Group, Purpose
from async_rl.rewards.responses import vote_of


async def report(
    service: BufferService, prompts: FakePrompts, version: int = 0
) -> tuple[dict[str, float], int]:
    held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(prompts.num_held_out)]
    reader = service.store.reader
    return await report_of(reader, version, held_out, decode=str, extraction="auto")


async def test_an_evaluation_is_reported_when_its_last_sample_is_in(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=4)
    config = make_config(max_attempts=1)
    async with opened(tmp_path, config, prompts) as service:
        for _ in range(2):
            await evaluate(service, 0)
        given = await tickets(service, 0, credit=2)
        assert [(t.purpose, t.num_samples) for t in given] == [(Purpose.EVAL, 1)] * 4
        assert service.state.queue()["generating"] == 0
        await put(service, given[1], passes=False, is_truncated=True)
        await fail(service, given[2].group_id, 1)
    async with opened(tmp_path, config, prompts) as service:
        await put(service, given[3], versions=[0] * 5)
        assert not service.state.evaluations.finished
        await put(service, given[0])
        assert service.state.evaluations.finished.popleft() == 0
        scalars, num_failed = await report(service, prompts)
        means = ("pass_at_1", "pass_at_k", "maj_at_k", "reward_mean")
        error = pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5)
        assert scalars == {
            **{f"eval/{name}": pytest.approx(2 / 3) for name in means},
            **{f"eval/{name}_error": error for name in means},
            "eval/version_mean": 0.0,
            "eval/num_samples": 3.0,
            "eval/length_mean": pytest.approx(11 / 3),
            "eval/truncated_share": pytest.approx(1 / 3),
        }
        assert num_failed == 1
    async with opened(tmp_path, config, prompts) as service:
        assert service.state.evaluations.finished.popleft() == 0


async def test_an_evaluation_draws_as_many_samples_as_are_asked_for(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=2)
    config = make_config()
    config = replace(config, evaluation=replace(config.evaluation, num_samples=3))
    async with opened(tmp_path, config, prompts) as service:
        await evaluate(service, 0)
        given = [t for t in await tickets(service, 0, credit=4) if t.purpose is Purpose.EVAL]
        assert [t.num_samples for t in given] == [3, 3]
        await put(service, given[0])
        await put(service, given[1], passes=False)
        scalars, _ = await report(service, prompts)
        assert scalars["eval/num_samples"] == 6
        assert scalars["eval/pass_at_1"] == scalars["eval/pass_at_k"] == 0.5


async def test_an_evaluation_is_not_made_again_after_a_restore(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=KEPT_SAMPLES + 2)
    async with opened(tmp_path, prompts=prompts) as service:
        await evaluate(service, 0)
        for ticket in await tickets(service, 0, credit=20):
            if ticket.purpose is Purpose.EVAL:
                await put(service, ticket)
        assert service.state.evaluations.finished.popleft() == 0
        figures = {"eval/num_samples": 18.0, "eval/pass_at_1": 0.25}
        service.store.finish_evaluation(0, figures)
        await service.store.flush()
        await evaluate(service, 0)
        assert service.state.evaluations.finished.popleft() == 0
        assert (await report(service, prompts))[0] == figures
        with pytest.raises(InfrastructureError, match="no longer contains the trajectories"):
            await service.store.reader.groups([KEPT_SAMPLES])
        assert len(await service.store.reader.groups([KEPT_SAMPLES - 1])) == 1


def result(
    passed: list[bool],
    votes: list[str | None] | None = None,
    greedy: bool | None = None,
    version: int = 0,
) -> dict[str, float]:
    """Sample i has 4 + i tokens; without a test its text is its vote."""
    texts = {4 + i: vote or "" for i, vote in enumerate(votes or [None] * len(passed))}
    prompt = FakePrompts().prompt(Purpose.EVAL, 0)
    group = Group(
        group_id=0,
        attempt=1,
        prompt_id="e0",
        purpose=Purpose.EVAL,
        data_source="fake",
        generator="g",
        admitted_version=0,
        trajectories=[
            make_trajectory([version] * (4 + i), passes=p, is_truncated=not p)
            for i, p in enumerate(passed)
        ],
        generation_s=1.0,
        baseline=None if greedy is None else make_trajectory([version], passes=greedy),
    )
    return result_of(prompt, group, lambda ids: texts[len(ids)], "auto")


def slow_mean(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, 1.96 * spread / math.sqrt(len(values))


def slow_majority(passed: list[bool], votes: list[str | None]) -> float:
    """Of every answer that no other answer beats, every sample that gives it."""
    shares = []
    for is_right, vote in zip(passed, votes, strict=True):
        beaten = any(votes.count(other) > votes.count(vote) for other in votes if other is not None)
        if vote is not None and not beaten:
            shares.append(float(is_right))
    return sum(shares) / len(shares) if shares else 0.0


def test_every_figure_equals_a_slow_count_over_all_samples() -> None:
    rng = random.Random(0)
    rows = []
    for prompt in range(40):
        votes = [rng.choice(["1", "2", "3", None]) for _ in range(5)]
        right = rng.choice(["1", "2", "3"])
        rows.append(([vote == right for vote in votes], votes, rng.random() < 0.02 * prompt))
    scalars = evaluation_scalars([result(passed, votes, greedy) for passed, votes, greedy in rows])
    flat = [p for passed, _, _ in rows for p in passed]
    expected = {
        "pass_at_1": slow_mean([passed.count(True) / 5 for passed, _, _ in rows]),
        "pass_at_k": slow_mean([1.0 if True in passed else 0.0 for passed, _, _ in rows]),
        "maj_at_k": slow_mean([slow_majority(passed, votes) for passed, votes, _ in rows]),
        "greedy_pass": slow_mean([1.0 if greedy else 0.0 for _, _, greedy in rows]),
        "reward_mean": slow_mean(
            [sum(1.0 if p else 0.0 for p in passed) / 5 for passed, _, _ in rows]
        ),
    }
    for name, (mean, error) in expected.items():
        assert scalars[f"eval/{name}"] == pytest.approx(mean), name
        assert scalars[f"eval/{name}_error"] == pytest.approx(error), name
    assert scalars["eval/num_samples"] == len(flat) == 200
    assert scalars["eval/pass_at_1"] == pytest.approx(flat.count(True) / 200)
    assert scalars["eval/truncated_share"] == pytest.approx(flat.count(False) / 200)
    assert scalars["eval/length_mean"] == 6.0
    assert 0 < scalars["eval/maj_at_k"] < scalars["eval/pass_at_k"]


def test_the_version_that_wrote_the_tokens_is_told() -> None:
    versions = [result([True], version=3), result([True], version=4)]
    assert evaluation_scalars(versions)["eval/version_mean"] == 3.5
    assert "eval/version_mean" not in evaluation_scalars([result([True], version=NO_VERSION)])
    assert evaluation_scalars([]) == {"eval/num_samples": 0.0}


@pytest.mark.parametrize(
    ("rule", "alike", "other", "none"),
    [
        ("gsm8k", ["so it is #### 1,200", "#### $1200", "1200.0"], "#### 1201", "no number"),
        ("math", [r"\boxed{\frac{1}{2}}", r"thus \boxed{ \frac{1} {2} }."], r"\boxed{2}", "2"),
        ("exact", ["hm\nParis", "Paris\n\n"], "Rome", "\n"),
    ],
)
def test_answers_in_words_vote_by_what_the_rule_reads(
    rule: str, alike: list[str], other: str, none: str
) -> None:
    problem = CodeProblem(tests=[AnswerTest(rule=rule, expected="7")])  # type: ignore[arg-type]
    votes = [vote_of(problem, response, "auto") for response in (*alike, other)]
    assert all(a == b for a, b in itertools.pairwise(votes[:-1]))
    assert votes[-1] not in (None, votes[0])
    assert vote_of(problem, none, "auto") is None


def test_programs_vote_by_their_text_without_layout_and_comments() -> None:
    problem = CodeProblem(tests=[AssertTest(code="assert f(1) == 2")])
    plain, laid_out = (
        "def f(x):\n    return x + 1\n",
        "def f( x ):  # one more\n\n    return (x+1)\n",
    )
    assert vote_of(problem, plain, "auto") == vote_of(
        problem, f"Thus:\n```python\n{laid_out}```\n", "auto"
    )
    assert vote_of(problem, plain, "auto") != vote_of(problem, plain.replace("1", "2"), "auto")
    assert vote_of(problem, "def f(", "whole") == "def f("
    assert vote_of(problem, "no block", "fenced") is None


@pytest.mark.covers("val_batch_size: every row")
def test_every_held_out_row_of_files_is_evaluated_and_of_the_embedded_task_the_first_256() -> None:
    files = compose(
        "grpo_code",
        ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]", "model.path=owner/name"],
    )
    assert (files.evaluation.num_prompts, compose("grpo_code").evaluation.num_prompts) == (0, 256)
