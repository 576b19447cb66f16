"""The learning rate follows the effective sample size of the batch's sequences."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import make_groups, make_trainer

from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer

# Without momentum from a step before, AdamW's first step is the learning rate times a direction.
KNOBS = ("learner.optimizer.lr=1e-3", "learner.optimizer.schedule=constant")
SCALED = "algorithm.step_scale=effective_sequences"


def old_groups(scorer: Trainer, *, noise: float) -> list[Group]:
    """Groups whose behavior log-probs are those of the model and some noise."""
    groups, rng = make_groups(), np.random.default_rng(1)
    for t in (t for g in groups for t in g.trajectories):
        near = scorer.logprobs([t.token_ids])[0] + rng.normal(scale=noise, size=len(t.token_ids))
        t.behavior_logprobs[:] = np.where(t.loss_mask, near, 0)
    return groups


def effective_share(groups: list[Group], scorer: Trainer) -> float:
    """By the definition, one sequence at a time."""
    weights = []
    for t in (t for g in groups for t in g.trajectories):
        ratio = scorer.logprobs([t.token_ids])[0].astype(np.float64) - t.behavior_logprobs
        weights.append(math.exp(ratio[t.loss_mask].sum()))
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def moved(model_path: Path, noise: float, *knobs: str) -> tuple[float, dict[str, float], float]:
    """How far a step moves the parameters, its metrics, and the effective share of the oracle."""
    trainer = make_trainer(model_path, "grpo_code", *KNOBS, *knobs)
    groups = old_groups(trainer, noise=noise)
    share = effective_share(groups, trainer)
    before = [tensor.clone() for tensor in trainer.full_tensors()]
    scalars = trainer.step(groups, 0).scalars
    after = list(trainer.full_tensors())
    steps = [(b - a).double().square().sum() for a, b in zip(before, after, strict=True)]
    return float(torch.stack(steps).sum().sqrt()), scalars, share


@pytest.mark.proves("algorithm.step_scale")
def test_the_step_is_shorter_by_the_square_root_of_the_effective_share(model_path: Path) -> None:
    plain, scalars, share = moved(model_path, 0.5)
    assert 0.05 < share < 0.8
    assert scalars["policy/step_scale"] == 1.0
    assert scalars["policy/effective_sequences"] == pytest.approx(share, rel=1e-3)
    scaled, scalars, _ = moved(model_path, 0.5, SCALED)
    assert scalars["policy/step_scale"] == pytest.approx(share**0.5, rel=1e-3)
    assert scaled / plain == pytest.approx(share**0.5, rel=1e-2)


@pytest.mark.proves("algorithm.step_scale", "algorithm.step_scale.fn")
def test_a_gradient_that_repeats_the_one_before_is_cut_to_the_bound(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With betas[0] = 0 the first moment is the gradient before, and the same batch at a tiny rate
    has nearly the same gradient again: only sqrt((1 - c^2) / (1 - bound^2)) of it is left.
    """
    knobs = ("learner.optimizer.betas=[0,0.95]", "learner.optimizer.lr=1e-6")
    kept = {}
    for bound in (0.1, 0.9, 1.0):
        monkeypatch.setattr("async_rl.examples.losses.gac.BOUND", bound)
        trainer = make_trainer(model_path, "grpo_code", "algorithm=gac", *KNOBS[1:], *knobs)
        groups = make_groups()
        assert trainer.step(groups, 0).scalars["policy/step_scale"] == 1.0
        kept[bound] = trainer.step(groups, 1).scalars["policy/step_scale"]
    assert kept[1.0] == 1.0
    assert kept[0.1] < 0.05
    assert kept[0.9] / kept[0.1] == pytest.approx((0.99 / 0.19) ** 0.5, rel=1e-2)
