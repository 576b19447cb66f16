"""A migrated file has the loss and the gradient of its source: files of each system, on one
recorded batch, against the system's published formulas in float64.

The formulas are written from verl 0.9.1 (`trainer/ppo/core_algos.py`), AReaL 1.0.4
(`trainer/ppo/actor.py`, `utils/functional/functional.py`) and TRL 1.16 (`trainer/grpo_trainer.py`).
Their numbers are those of the source's files and defaults, not those of the migrated file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from composing import compose
from learner_support import make_groups
from tables import table
from torch import Tensor

from async_rl.algorithms.losses import token_weights
from async_rl.batching.batch import Batch, collate_part, whole
from async_rl.batching.packing import Pass
from async_rl.config.run import RunConfig
from async_rl.launchers.commands.migrate import to_yaml
from async_rl.launchers.migration.applying import read
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import compute_targets, trained_mask
from async_rl.learner.objective_state import Moments
from async_rl.learner.pass_loss import correction, policy_pass_loss


class Recorded(NamedTuple):
    """One batch: 4 groups of 4 responses; tensors of the R tokens are float64."""

    batch: Batch
    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor

    def responses(self, policy: Tensor) -> list[Response]:
        """The tokens of each response."""
        parts = (policy, self.proximal, self.behavior, self.reference)
        of_response = (self.batch.sequence_index == number for number in range(16))
        return [Response(*(part[index] for part in parts)) for index in of_response]


class Response(NamedTuple):
    """Log-probs of the tokens of one response, with those of the engine that sampled it."""

    lp: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor


def recorded() -> Recorded:
    groups = make_groups(3, num_groups=4, size=4)
    batch = collate_part(whole(groups), device=torch.device("cpu"))
    rng = np.random.default_rng(11)

    def near(x: Tensor, scale: float) -> Tensor:
        return (x + torch.from_numpy(rng.normal(scale=scale, size=len(x)))).float().double()

    behavior = batch.behavior_logprobs.double()
    proximal = near(behavior, 0.5)
    return Recorded(batch, near(proximal, 0.3), proximal, behavior, near(proximal, 0.4))


def of_product(config: RunConfig, data: Recorded) -> tuple[float, Tensor]:
    """The loss of the whole batch as one minibatch, and its gradient by the log-probs."""
    batch, algorithm = data.batch, config.algorithm
    nothing = torch.zeros(batch.num_tokens)
    has_reference = algorithm.reference is not None
    coef = algorithm.reference.coef if has_reference else 0.0
    reference = data.reference.float() if has_reference else None
    before = PolicyOutput(data.proximal.float(), nothing, None, reference, None)
    mask = trained_mask(batch, version=0, config=config)
    targets = compute_targets(batch, mask, before, config=config, kl_coef=coef, moments=Moments())
    sequences = batch.sequences(mask)
    kind, tokens = algorithm.aggregation.kind, getattr(algorithm.aggregation, "tokens", None)
    weights = token_weights(sequences, aggregation=kind, constant_tokens=tokens)
    policy = data.policy.float().requires_grad_()
    empty = torch.zeros(0, dtype=torch.int64)
    needed = [f.name for f in dataclasses.fields(Pass) if f.default is dataclasses.MISSING]
    parts = dict.fromkeys(needed, empty)
    row = Pass(**parts | {"token_index": torch.arange(batch.num_tokens)})
    ratio = before.logprobs - batch.behavior_logprobs
    loss, _ = policy_pass_loss(
        algorithm,
        batch,
        row,
        PolicyOutput(policy, nothing, None, None, None),
        weights=weights,
        before=before,
        targets=targets,
        corrected=correction(algorithm.policy_loss.correction, ratio, sequences=sequences),
        kl_coef=coef,
    )
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad


# The oracles: the loss of the tokens of one response, given its advantage, as float64.
Oracle = Callable[[Response, Tensor], Tensor]
Reduction = Callable[[list[Tensor]], Tensor]


def centered(rewards: Tensor) -> Tensor:
    """r - mean of each group of 4."""
    groups = rewards.view(4, 4)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def by_std(rewards: Tensor) -> Tensor:
    std = rewards.view(4, 4).std(1, keepdim=True)
    return (centered(rewards).view(4, 4) / (std + 1e-6)).flatten()


def leave_out(rewards: Tensor) -> Tensor:
    """r - mean of the 3 others of each group."""
    groups = rewards.view(4, 4)
    return (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten()


def shifted(rewards: Tensor) -> Tensor:
    """reward_bias and reward_scaling of AReaL."""
    return centered(((rewards - 0.5) * 4).clamp(-20, 20))


def as_they_are(rewards: Tensor) -> Tensor:
    return rewards


def surrogate(
    log_ratio: Tensor, advantage: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """verl's compute_policy_loss_vanilla, which AReaL and TRL compute too."""
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)


def k3(reference: Tensor, policy: Tensor) -> Tensor:
    return (reference - policy).exp() - (reference - policy) - 1


def token_mean(found: list[Tensor]) -> Tensor:
    return torch.cat(found).mean()


def sequence_mean(found: list[Tensor]) -> Tensor:
    return torch.stack([tokens.mean() for tokens in found]).mean()


def sum_over_12(found: list[Tensor]) -> Tensor:
    """Sums over the response length."""
    return torch.stack([tokens.sum() for tokens in found]).mean() / 12


def of_sequence(log_ratio: Tensor) -> Tensor:
    """GSPO's ratio of the sequence at every token, with the gradient of its mean."""
    return log_ratio.mean().expand_as(log_ratio)


def verl_grpo(r: Response, advantage: Tensor) -> Tensor:
    """use_kl_loss with low_var_kl; clip_ratio_c is 3.0 where the file is silent."""
    kept = surrogate(r.lp - r.old, advantage, low=0.2, high=0.28, dual=3.0)
    return kept + 0.01 * k3(r.reference, r.lp)


def verl_rloo(r: Response, advantage: Tensor) -> Tensor:
    """Decoupled, with a truncated weight per token."""
    weight = (r.old - r.sampled).exp().clamp(max=1.4)
    return weight * surrogate(r.lp - r.old, advantage, low=0.1, high=0.1, dual=3.0)


def verl_bypass(r: Response, advantage: Tensor) -> Tensor:
    """Dr. GRPO's advantage, the ratio to the rollout's log-probs."""
    return surrogate(r.lp - r.sampled, advantage, low=0.2, high=0.2, dual=1.5)


def verl_gspo(r: Response, advantage: Tensor) -> Tensor:
    """verl 0.7.0 core_algos.py:1059: the mean of sequences, whatever loss_agg_mode is."""
    return surrogate(of_sequence(r.lp - r.old), advantage, low=3e-4, high=4e-4)


def areal_decoupled(r: Response, advantage: Tensor) -> Tensor:
    """Tokens whose weight is above the bound leave the sum, not the count."""
    weight = (r.old - r.sampled).exp()
    kept = weight * surrogate(r.lp - r.old, advantage, low=0.2, high=0.3, dual=3.0)
    return torch.where(weight > 1.8, 0.0, kept)


def areal_returns(r: Response, reward: Tensor) -> Tensor:
    """No reward_norm: the return of each token, with the KL of the later ones."""
    paid = -0.05 * (r.old - r.reference).clamp(-10, 10)
    paid[-1] = paid[-1] + reward
    advantage = torch.zeros_like(paid)
    carried = 0.0
    for t in reversed(range(len(paid))):
        carried = float(paid[t]) + 0.9 * carried
        advantage[t] = carried
    return surrogate(r.lp - r.old, advantage, low=0.2, high=0.2)


def areal_cispo(r: Response, advantage: Tensor) -> Tensor:
    """AReaL 2.0.0 cispo_loss_fn: a bounded, detached ratio as the weight of each log-prob."""
    return -(r.lp - r.old).exp().detach().clamp(0, 1.3) * advantage * r.lp


def trl_dapo(r: Response, advantage: Tensor) -> Tensor:
    """vLLM's weight of a sequence is masked above 3.0 where the script is silent."""
    weight = (r.old - r.sampled).sum().exp()
    kept = surrogate(r.lp - r.old, advantage, low=0.2, high=0.28)
    return kept * torch.where(weight > 3.0, 0.0, weight)


def trl_grpo(r: Response, advantage: Tensor) -> Tensor:
    """Release 0.20: beta, delta, the mean of sequences; without vLLM no weight."""
    ratio = (r.lp - r.old).exp()
    first = ratio.clamp(max=1.5) * advantage
    kept = -torch.minimum(first, ratio.clamp(0.8, 1.2) * advantage)
    return kept + 0.04 * k3(r.reference, r.lp)


def trl_sequence(r: Response, advantage: Tensor) -> Tensor:
    """importance_sampling_level=sequence, dr_grpo's constant, a truncated weight."""
    weight = (r.old - r.sampled).sum().exp().clamp(max=1.3)
    return weight * surrogate(of_sequence(r.lp - r.old), advantage, low=3e-4, high=4e-4)


ORACLES: dict[str, tuple[Oracle, Callable[[Tensor], Tensor], Reduction]] = {
    "areal_decoupled": (areal_decoupled, shifted, token_mean),
    "areal_cispo": (areal_cispo, centered, token_mean),
    "areal_returns": (areal_returns, as_they_are, token_mean),
    "trl_dapo": (trl_dapo, centered, token_mean),
    "trl_grpo": (trl_grpo, centered, sequence_mean),
    "trl_sequence": (trl_sequence, centered, sum_over_12),
    "verl_bypass": (verl_bypass, centered, sequence_mean),
    "verl_gspo": (verl_gspo, by_std, sequence_mean),
    "verl_grpo": (verl_grpo, by_std, token_mean),
    "verl_rloo": (verl_rloo, leave_out, sum_over_12),
}
CASES = table(__file__, "cases")


@pytest.mark.parametrize("case", CASES)
def test_a_migrated_file_has_the_gradient_of_its_source(tmp_path: Path, case: str) -> None:
    given = CASES[case]
    name = given["file"]
    oracle, advantages, reduction = ORACLES[given["oracle"]]
    (tmp_path / name).write_text(given["text"])
    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(read(tmp_path / name, release=given["release"])))
    config = compose(str(ours), ["num_steps=1", "data.train_files=[a.jsonl]"])
    data = recorded()
    found, gradient = of_product(config, data)
    policy = data.policy.clone().requires_grad_()
    per_response = zip(data.responses(policy), advantages(data.batch.rewards.double()), strict=True)
    expected = reduction([oracle(*each) for each in per_response])
    expected.backward()
    assert policy.grad is not None
    assert found == pytest.approx(float(expected.detach()), abs=1e-6)
    difference = (gradient.double() - policy.grad).norm() / policy.grad.norm()
    assert difference < 1e-6
