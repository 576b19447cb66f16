"""A cell of the league trains exact ages with the learner's own log-probs, and its figures are
right.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import compose

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.types import Group, Prompt
from benchmarks.comparing import holm, ratio, student_p
from benchmarks.embedded.tiny_coder import TinyCoder, make_tiny_coder
from benchmarks.learning.bench import Bench
from benchmarks.learning.sampler import Response
from benchmarks.learning.staleness_cell import run_cell, run_up

SMALL = TinyCoder(hidden_size=64, num_layers=2, num_heads=2, warm_start_steps=2, warm_start_batch=4)


class Recording(Bench):
    """Notes which weights sampled which batch. Its task is soon learned: a fourth of the tokens is
    right.
    """

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.sampled: list[tuple[int, int]] = []

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        self.sampled.append((number, version))
        return super().batch(config, number=number, version=version)

    def _reward(self, prompt: Prompt, response: Response) -> float:
        return sum(token % 4 == 1 for token in response.token_ids) / 4


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Recording]:
    (tmp_path / "model").mkdir()
    make_tiny_coder(tmp_path / "model", SMALL, lambda *_: None)
    with Recording(tmp_path / "model") as bench:
        yield bench


def make_config(age: int, *overrides: str) -> RunConfig:
    small = ["num_steps=5", "buffer.age_rule=exact", "buffer.groups_per_step=2"]
    small += ["generation.group_size=4", "data.max_response_tokens=4", "reward.stop_on=[]"]
    evaluated = ["evaluation.every_steps=5", "evaluation.num_prompts=8"]
    max_age = f"buffer.max_staleness_versions={age}"
    return compose("grpo_code", [*small, *evaluated, max_age, *overrides])


def test_after_a_run_up_every_step_trains_the_exact_age(bench: Recording, tmp_path: Path) -> None:
    before = make_config(4, "num_steps=4", "learner.optimizer.lr=1e-2")
    for _ in range(2):
        start = run_up(bench, before, tmp_path)
    assert bench.sampled == [(n, n - 4) for n in range(5)], "the second call reads the first"
    for age in (0, 3):
        bench.sampled.clear()
        rows = run_cell(bench, make_config(age), start=start)
        assert bench.sampled == [(4 + version, version) for version in range(1, 5 - age)]
        assert rows[-1]["staleness/mean_versions"] == age
        # Version 0 is the last policy of the run-up, and no other sampled its batch.
        assert (rows[-1]["policy/effective_sequences"] > 0.999) is (age == 0)
    with pytest.raises(ConfigError, match="max_staleness_versions=5 is above the 4 steps"):
        run_cell(bench, make_config(5), start=start)


def test_differences_are_tested_in_pairs_and_corrected_for_their_number() -> None:
    # The two-sided 5 % points of Student's distribution in every table of it.
    assert student_p(12.706, 1) == pytest.approx(0.05, abs=1e-4)
    assert student_p(-2.776, 4) == pytest.approx(0.05, abs=1e-4)
    compared = ratio([2.0, 8.0, 4.0], [1.0, 2.0, 2.0])
    # Logarithms to base 2 are 1, 2, 1: mean 4/3, standard error 1/3, t = 4 with 2 degrees.
    assert compared.value == pytest.approx(2 ** (4 / 3))
    assert compared.error == pytest.approx(2 ** (1 / 3))
    assert compared.p == pytest.approx(0.0572, abs=1e-4)
    assert ratio([1.0, 2.0], [1.0, 2.0]).p == 1
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "c": 0.06, "b": 0.06}
    )
