"""The figures of an evaluation against slow re-computations, and where several samples of a prompt are drawn."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from async_rl.config_check import problems
from async_rl.launchers.compose import compose_unchecked
from async_rl.processes.evaluation import evaluation_scalars, interval
from async_rl.summary import Summary


def group(passed: list[bool]) -> Summary:
    return Summary(
        oldest_version=0,
        newest_version=0,
        num_tokens=1,
        num_trained_tokens=1,
        reward_mean=sum(passed) / len(passed),
        pass_rate=sum(passed) / len(passed),
        response_length_mean=4.0,
        truncated_share=0.0,
    )


def test_figures_equal_a_count_over_all_samples() -> None:
    rng = random.Random(0)
    samples = [[rng.random() < 0.1 * prompt for _ in range(4)] for prompt in range(9)]
    scalars = evaluation_scalars([group(passed) for passed in samples], num_samples=4)
    flat = [passed for row in samples for passed in row]
    assert scalars["eval/num_samples"] == len(flat) == 36
    assert scalars["eval/pass_at_1"] == pytest.approx(sum(flat) / len(flat))
    assert scalars["eval/pass_at_k"] == pytest.approx(len([row for row in samples if True in row]) / len(samples))
    assert scalars["eval/pass_at_k"] > scalars["eval/pass_at_1"]


def test_one_sample_per_prompt_makes_both_figures_equal() -> None:
    scalars = evaluation_scalars([group([True]), group([False])], num_samples=1)
    assert scalars["eval/pass_at_1"] == scalars["eval/pass_at_k"] == 0.5
    assert scalars["eval/pass_at_1_error"] == scalars["eval/pass_at_k_error"]


def test_the_interval_holds_the_true_mean_in_about_95_of_100_evaluations() -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(1000):
        values = [rng.betavariate(2, 3) for _ in range(60)]
        inside += abs(statistics.fmean(values) - 0.4) <= interval(values)
    assert 925 <= inside <= 970


def test_samples_of_one_prompt_do_not_count_as_independent() -> None:
    alike = [group([True] * 8), group([False] * 8)] * 5
    error = evaluation_scalars(alike, num_samples=8)["eval/pass_at_1_error"]
    assert error == pytest.approx(1.96 * math.sqrt(10 / 36) / math.sqrt(10))
    assert interval([0.3]) == 0.0


def test_an_evaluation_without_samples_says_only_that() -> None:
    assert evaluation_scalars([], num_samples=4) == {"eval/num_samples": 0.0}


def test_greedy_evaluation_of_several_samples_is_refused() -> None:
    def found(*overrides: str) -> list[str]:
        config = compose_unchecked("grpo_code", overrides)
        return [problem for problem in problems(config) if problem.startswith("evaluation.num_samples")]

    assert found("evaluation.num_samples=4", "evaluation.temperature=0")
    assert not found("evaluation.num_samples=4")
    assert not found("evaluation.temperature=0")
