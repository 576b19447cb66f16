"""A cell of the league in one process trains exact ages, with the learner's own log-probs and the
verifier's own verdicts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from composing import compose

from async_rl.config.run import RunConfig
from async_rl.core.types import Group, Prompt
from async_rl.data.embedded import TinyCoder
from async_rl.data.prepare import prepare_model
from async_rl.learner.trainer import Trainer
from async_rl.training.age_watch import AgeWatch
from benchmarks.learning.sampler import Response
from benchmarks.learning.staleness_cell import (
    Bench,
    make_trainer,
    run_cell,
)

SMALL = TinyCoder(hidden_size=64, num_layers=2, num_heads=2, warm_start_steps=2, warm_start_batch=4)


class Recording(Bench):
    """Notes which weights sampled which batch."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.sampled: list[tuple[int, int]] = []

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        self.sampled.append((number, version))
        return super().batch(config, number=number, version=version)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return prepare_model(compose("grpo_code"), lambda *_: None, embedded=SMALL)


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
            "buffer.age_rule=exact",
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
    trainer = make_trainer(config, bench.model_path, tmp_path)
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
def test_every_batch_is_sampled_by_the_version_of_its_age(
    bench: Recording, tmp_path: Path, age: int
) -> None:
    bench.sampled.clear()
    rows = run_cell(bench, make_config(age), tmp_path)
    assert sorted(bench.sampled) == [(n, max(0, n - age)) for n in range(5)]
    assert [row["step"] for row in rows] == [0, 5]
    assert rows[-1]["samples"] == 5 * 2 * 4


class Easy(Bench):
    """A task that is learned in thirty small steps: a fourth of the tokens is right."""

    def _reward(self, prompt: Prompt, response: Response) -> float:
        return sum(token % 4 == 1 for token in response.token_ids) / 4


def test_a_burst_of_old_data_is_announced_and_neither_collapses_nor_stops_the_run(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Thirty fresh batches, then twelve that version 0 sampled, then twelve fresh ones."""
    config = make_config(
        42,
        "algorithm=vcpo",
        "learner.optimizer.lr=6e-3",
        groups=4,
        size=8,
    )
    burst = range(30, 42)
    bench, watch = Easy(model_path), AgeWatch(logging.getLogger())
    trainer = make_trainer(config, model_path, tmp_path)
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
    trainer = make_trainer(config, model_path, tmp_path)
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
