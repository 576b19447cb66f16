"""A cell of the league trains exact ages with the learner's own log-probs, and tables do not mix
cells of different settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from composing import compose

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.types import Group, Prompt
from async_rl.learner.trainer import Trainer
from async_rl.training.age_watch import AgeWatch
from benchmarks.comparing import holm, ratio, student_p
from benchmarks.embedded.tiny_coder import TinyCoder, make_tiny_coder
from benchmarks.learning.bench import Bench
from benchmarks.learning.sampler import Response
from benchmarks.learning.staleness_cell import make_trainer, run_cell, run_up
from benchmarks.learning.staleness_report import thousands
from benchmarks.learning.staleness_results import AS_LAUNCHED, METHODS, Cell, result
from benchmarks.study import Recorded, refuse_mixing

SMALL = TinyCoder(hidden_size=64, num_layers=2, num_heads=2, warm_start_steps=2, warm_start_batch=4)


class Recording(Bench):
    """Notes which weights sampled which batch."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.sampled: list[tuple[int, int]] = []

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        self.sampled.append((number, version))
        return super().batch(config, number=number, version=version)


class Easy(Recording):
    """A task that is learned in thirty small steps: a fourth of the tokens is right."""

    def _reward(self, prompt: Prompt, response: Response) -> float:
        return sum(token % 4 == 1 for token in response.token_ids) / 4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_coder(directory, SMALL, lambda *_: None)
    return directory


@pytest.fixture(scope="module")
def bench(model_path: Path) -> Iterator[Recording]:
    with Recording(model_path) as bench:
        yield bench


def make_config(age: int, *overrides: str, groups: int = 2, size: int = 4) -> RunConfig:
    return compose(
        "grpo_code",
        [
            "num_steps=5",
            f"buffer.max_staleness_versions={age}",
            *(() if "buffer.age_rule=drop" in overrides else ("buffer.age_rule=exact",)),
            f"buffer.groups_per_step={groups}",
            f"generation.group_size={size}",
            "data.max_response_tokens=4",
            "evaluation.every_steps=5",
            "evaluation.num_prompts=32",
            "reward.stop_on=[]",
            *overrides,
        ],
    )


def test_behavior_logprobs_are_those_of_the_learner(bench: Recording, tmp_path: Path) -> None:
    config = make_config(0)
    trainer = make_trainer(config, bench.model_path)
    bench.load(trainer)
    samples = [t for group in bench.batch(config, number=7, version=1) for t in group.trajectories]
    assert len({tuple(t.token_ids) for t in samples}) == len(samples) == 8
    for sample, logprobs in zip(
        samples, trainer.logprobs([t.token_ids for t in samples]), strict=True
    ):
        written = sample.loss_mask
        assert np.abs(sample.behavior_logprobs[written] - logprobs[written]).max() < 1e-5
    assert trainer.step(bench.batch(config, number=8, version=0), 0).scalars[
        "policy/effective_sequences"
    ] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("age", [0, 2])
def test_without_a_run_up_a_batch_is_as_old_as_the_run(
    bench: Recording, tmp_path: Path, age: int
) -> None:
    bench.sampled.clear()
    rows = run_cell(bench, make_config(age))
    assert sorted(bench.sampled) == [(n, max(0, n - age)) for n in range(5)]
    assert [row["step"] for row in rows] == [0, 5]
    assert rows[-1]["samples"] == 5 * 2 * 4
    assert rows[-1]["staleness/mean_versions"] == pytest.approx(min(age, 7 / 5))


def test_a_cell_uses_the_groups_of_the_step_before_once_more(
    bench: Recording, tmp_path: Path
) -> None:
    twice = ["buffer.uses_per_group=2", "buffer.age_rule=drop"]
    rows = run_cell(bench, make_config(2, *twice))
    # At age 1 new groups, and at age 2 old ones, from the third step on.
    assert rows[-1]["staleness/mean_versions"] == pytest.approx((0 + 1 + 3 * 1.5) / 5, abs=0.1)
    assert rows[-1]["samples"] == 5 * 2 * 4


def test_after_a_run_up_every_step_trains_the_exact_age(model_path: Path, tmp_path: Path) -> None:
    bench = Easy(model_path)
    before = make_config(4, "num_steps=4", "learner.optimizer.lr=1e-2")
    for _ in range(2):
        start = run_up(bench, before, tmp_path)
    assert bench.sampled == [(n, n - 4) for n in range(5)], "the second call reads the first"
    for age in (0, 3, 4):
        bench.sampled.clear()
        rows = run_cell(bench, make_config(age), start=start)
        assert bench.sampled == [(4 + version, version) for version in range(1, 5 - age)]
        assert rows[-1]["staleness/mean_versions"] == age
        # Version 0 is the last policy of the run-up, and no other sampled its batch.
        assert (rows[-1]["policy/effective_sequences"] > 0.999) is (age == 0)
    with pytest.raises(ConfigError, match="max_staleness_versions=5 is above the 4 steps"):
        run_cell(bench, make_config(5), start=start)


def test_a_cell_that_never_reached_the_goal_counts_with_all_its_samples() -> None:
    curve = {0: 0.5, 640: 0.7, 1280: 0.9, 1920: 0.6, 2560: 0.6}
    rows = [
        {"step": n // 64, "samples": n, "eval/pass_at_1": rate, "policy/effective_sequences": 1.0}
        | {"staleness/mean_versions": n / 640}
        for n, rate in curve.items()
    ]
    reached = result(rows)
    assert reached.samples == pytest.approx(960)
    assert (reached.is_censored, reached.is_collapsed) == (False, True)
    assert reached.mean_age == pytest.approx((640 * 1 + 320 * 2) / 960)
    never = result([row | {"eval/pass_at_1": 0.7} for row in rows])
    assert (never.samples, never.is_censored, never.is_collapsed) == (2560, True, False)
    assert thousands([reached, reached]) == "0.96 +- 0.00 (2 of 2)"
    assert thousands([reached, never]) == ">= 1.76 +- 0.80 (1 of 2)"


def test_all_methods_of_the_league_have_one_schedule() -> None:
    for method in (*METHODS, AS_LAUNCHED):
        cell = Cell(method=method, age=16, seed=3, factor=0.5)
        optimizer = cell.config.learner.optimizer
        assert optimizer.schedule == ("constant" if method == AS_LAUNCHED else "cosine")
        assert cell.config.buffer.max_staleness_versions == 16
        assert cell.config.seed == 3
    slow = Cell(method="grpo", age=1, seed=0, rate=3e-4).config.learner.optimizer
    assert (slow.lr, slow.schedule) == (3e-4, "constant")


def test_cells_of_different_settings_are_not_mixed(tmp_path: Path) -> None:
    runs = [Recorded(tmp_path / "study.jsonl", name) for name in ("a", "b", "old")]
    for run, schedule in zip(runs, ("constant", "cosine"), strict=False):
        setting = f"learner.optimizer.schedule={schedule}"
        run.write([{"step": 0}], config=make_config(0, setting))
    allowed = {"learner.optimizer.schedule"}
    refuse_mixing(runs[:2], apart_from=allowed)
    with pytest.raises(
        SystemExit, match=r"a ran with learner\.optimizer\.schedule=constant, b with cosine"
    ):
        refuse_mixing(runs[:2], apart_from=())
    runs[2].write([{"step": 0}])
    with pytest.raises(SystemExit, match="old has no configuration"):
        refuse_mixing(runs, apart_from=allowed)


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


def test_a_burst_of_old_data_is_announced_and_neither_collapses_nor_stops_the_run(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Thirty fresh batches, then twelve that version 0 sampled, then twelve fresh ones."""
    config = make_config(42, "algorithm=vcpo", "learner.optimizer.lr=6e-3", groups=4, size=8)
    burst = range(30, 42)
    bench, watch = Easy(model_path), AgeWatch(logging.getLogger())
    trainer = make_trainer(config, model_path)
    rates, scales, stages = {}, {}, {}
    bench.load(trainer)
    old = [bench.batch(config, number=100 + number, version=0) for number in burst]
    for version in range(54):
        groups = old.pop() if version in burst else None
        if groups is None:
            groups = bench.batch(config, number=version, version=version)
        scalars = trainer.step(groups, version).scalars
        watch.observe(version + 1, scalars)
        bench.load(trainer)
        scales[version], stages[version] = scalars["policy/step_scale"], watch.stage
        if version in (0, 29, 41, 53):
            rates[version] = bench.pass_rate(config, version + 1)
    assert rates[0] < 0.4
    assert rates[29] > 0.7
    assert min(rates[41], rates[53]) > rates[29] - 0.1
    assert max(scales[version] for version in burst) < 0.8 < scales[53]
    assert stages[29] == stages[53] == "training"
    assert stages[41].startswith("training: old data"), "the mean over ten steps"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warnings] == ["step 38"]


class Rounded(Easy):
    """Draws from weights of two bits, with a scale for each row, as a quantized engine does."""

    def load(self, trainer: Trainer) -> None:
        super().load(trainer)
        for name, weight in self.sampler._weights.items():
            if weight.ndim > 1:
                scale = weight.abs().amax(-1, keepdim=True)
                self.sampler._weights[name] = (weight / scale).round() * scale


def test_a_coarse_engine_is_named_before_the_policy_falls(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lr = "learner.optimizer.lr=6e-3"
    config = make_config(0, "num_steps=60", "algorithm=vcpo", lr, groups=4, size=8)
    bench = Rounded(model_path)
    watch = AgeWatch(logging.getLogger(), quantization="quantization=int2")
    trainer = make_trainer(config, model_path)
    bench.load(trainer)
    for version in range(60):
        scalars = trainer.step(bench.batch(config, number=version, version=version), version)
        watch.observe(version + 1, scalars.scalars)
        bench.load(trainer)
        if warnings := [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]:
            break
    assert (
        "generation.vllm.extra=quantization=int2 changes the engine's log-probs by" in warnings[0]
    )
    assert scalars.scalars["mismatch/engine_abs_mean"] > 0.2
    assert bench.pass_rate(config, 60) > 0.9
