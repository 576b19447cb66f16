"""The learning rate follows the effective sample size of the batch's sequences."""

import math
from pathlib import Path

import numpy as np
import pytest
from learner_support import make_groups, make_trainer, relative_difference, weights_of

from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer

# Without momentum from a step before, AdamW's first step is the learning rate times a direction.
KNOBS = ("learner.optimizer.lr=1e-3", "learner.optimizer.schedule=constant")
SCALED = "algorithm.step_scale=effective_sequences"


def old_groups(scorer: Trainer) -> list[Group]:
    """Groups whose behavior log-probs are those of the model and some noise."""
    groups, rng = make_groups(), np.random.default_rng(1)
    for t in (t for g in groups for t in g.trajectories):
        near = scorer.logprobs([t.token_ids])[0] + rng.normal(scale=0.5, size=len(t.token_ids))
        t.behavior_logprobs[:] = np.where(t.loss_mask, near, 0)
    return groups


def effective_share(groups: list[Group], scorer: Trainer) -> float:
    """By the definition, one sequence at a time."""
    weights = []
    for t in (t for g in groups for t in g.trajectories):
        ratio = scorer.logprobs([t.token_ids])[0].astype(np.float64) - t.behavior_logprobs
        weights.append(math.exp(ratio[t.loss_mask].sum()))
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.proves("algorithm.step_scale")
def test_the_step_is_shorter_by_the_square_root_of_the_effective_share(model_path: Path) -> None:
    moved, scalars = [], []
    for knobs in ((), (SCALED,)):
        trainer = make_trainer(model_path, "grpo_code", *KNOBS, *knobs)
        groups = old_groups(trainer)
        share = effective_share(groups, trainer)
        before = weights_of(trainer)
        scalars.append(trainer.step(groups, 0).scalars)
        moved.append(relative_difference(weights_of(trainer), before))
    assert 0.05 < share < 0.8
    assert scalars[0]["policy/effective_sequences"] == pytest.approx(share, rel=1e-3)
    assert scalars[0]["policy/step_scale"] == 1.0
    assert scalars[1]["policy/step_scale"] == pytest.approx(share**0.5, rel=1e-3)
    assert moved[1] / moved[0] == pytest.approx(share**0.5, rel=1e-2)


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
