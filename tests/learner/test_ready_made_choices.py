"""No file of conf/algorithm only renames another: each trains otherwise than grpo, as the oracle of
test_steps_equal_the_oracle.py computes it or as here.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_support import make_groups, make_trainer
from tables import table

from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer

COMPUTED = " ".join(
    case["settings"]
    for case in table(str(Path(__file__).with_name("steps_equal_the_oracle")), "cases")
).split()
CHOICES = sorted(
    path.stem
    for path in Path("conf/algorithm").glob("*.yaml")
    if path.stem != "grpo" and f"algorithm={path.stem}" not in COMPUTED
)


def stale_groups(scorer: Trainer) -> list[Group]:
    """Groups with a greedy answer, and behavior log-probs somewhat off those of the model."""
    groups, rng = make_groups(), np.random.default_rng(3)
    for t in (t for g in groups for t in g.trajectories):
        near = scorer.logprobs([t.token_ids])[0] + rng.normal(scale=0.6, size=len(t.token_ids))
        t.behavior_logprobs[:] = np.where(t.loss_mask, near, 0)
    return [msgspec.structs.replace(g, baseline=g.trajectories[0]) for g in groups]


@functools.cache
def trained(model_path: Path, choice: str, *knobs: str, num_steps: int = 1) -> torch.Tensor:
    """The parameters after some steps on one batch, in one row."""
    fits = ["reward.overlong_tokens=4"] if choice == "dapo" else []
    trainer = make_trainer(model_path, "grpo_code", f"algorithm={choice}", *fits, *knobs)
    groups = stale_groups(trainer)
    for version in range(num_steps):
        trainer.step(groups, version)
    return torch.cat([tensor.flatten().double() for tensor in trainer.full_tensors()])


@pytest.mark.parametrize("choice", CHOICES)
def test_a_ready_made_choice_differs_from_grpo(model_path: Path, choice: str) -> None:
    # Four groups allow no more minibatches.
    fits = ["learner.minibatches=4"] if choice == "dapo" else []
    # GAC compares a step with those before.
    num_steps = 2 if choice == "gac" else 1
    difference = trained(model_path, choice, *fits, num_steps=num_steps) - trained(
        model_path, "grpo", num_steps=num_steps
    )
    # One AdamW step of RLOO differs by the scale of a group's advantages only.
    assert difference.abs().max() > 1e-6
