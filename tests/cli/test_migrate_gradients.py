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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One batch: 4 groups of 4 responses; tensors of the R tokens are float64."""

    batch: Batch
    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor

    def per_sequence(self, x: Tensor) -> list[Tensor]:
        """The tokens of each response."""
        index = self.batch.sequence_index
        return [x[index == number] for number in range(16)]


def recorded() -> Recorded:
    groups = make_groups(3, num_groups=4, size=4)
    batch = collate_part(whole(groups), device=torch.device("cpu"))
    rng = np.random.default_rng(11)

    def near(x: Tensor, scale: float) -> Tensor:
        return (x + torch.from_numpy(rng.normal(scale=scale, size=len(x)))).float().double()

    behavior = batch.behavior_logprobs.double()
    proximal = near(behavior, 0.5)
    return Recorded(
        batch=batch,
        policy=near(proximal, 0.3),
        proximal=proximal,
        behavior=behavior,
        reference=near(proximal, 0.4),
    )


def of_product(config: RunConfig, data: Recorded) -> tuple[float, Tensor]:
    """The loss of the whole batch as one minibatch, and its gradient by the log-probs."""
    batch, algorithm = data.batch, config.algorithm
    nothing = torch.zeros(batch.num_tokens)
    before = PolicyOutput(
        logprobs=data.proximal.float(),
        entropies=nothing,
        ref_logprobs=None if algorithm.reference is None else data.reference.float(),
        kl=None,
        values=None,
    )
    coef = 0.0 if algorithm.reference is None else algorithm.reference.coef
    mask = trained_mask(batch, version=0, config=config)
    targets = compute_targets(batch, mask, before, config=config, kl_coef=coef, moments=Moments())
    sequences = batch.sequences(mask)
    aggregation = algorithm.aggregation
    weights = token_weights(
        sequences,
        aggregation=aggregation.kind,
        constant_tokens=getattr(aggregation, "tokens", None),
    )
    policy = data.policy.float().requires_grad_()
    empty = torch.zeros(0, dtype=torch.int64)
    row = Pass(
        input_ids=empty,
        position_ids=empty,
        predict_index=empty,
        target_ids=empty,
        token_index=torch.arange(batch.num_tokens),
        last_index=empty,
        sequences=empty,
        segments=empty,
    )
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


# The oracles: the loss of a list of responses, each a float64 tensor of its tokens.
Oracle = Callable[[Recorded, Tensor], Tensor]


def grouped(rewards: Tensor, *, std_eps: float | None = None, leave_out: bool = False) -> Tensor:
    """(r - mean) / (std + eps) of each group of 4."""
    groups = rewards.view(4, 4)
    mean = groups.mean(1, keepdim=True)
    if leave_out:
        mean = (groups.sum(1, keepdim=True) - groups) / 3
    centered = groups - mean
    if std_eps is not None:
        centered = centered / (groups.std(1, keepdim=True) + std_eps)
    return centered.flatten()


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


def losses(
    data: Recorded, policy: Tensor, token_loss: Callable[[int, Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    parts = [data.per_sequence(x) for x in (policy, data.proximal, data.behavior)]
    return [token_loss(n, *tokens) for n, tokens in enumerate(zip(*parts, strict=True))]


def token_mean(found: list[Tensor]) -> Tensor:
    return torch.cat(found).mean()


def sequence_mean(found: list[Tensor]) -> Tensor:
    return torch.stack([tokens.mean() for tokens in found]).mean()


def sequence_sum(found: list[Tensor], constant: int) -> Tensor:
    return torch.stack([tokens.sum() for tokens in found]).mean() / constant


def of_sequence(log_ratio: Tensor) -> Tensor:
    """GSPO's ratio of the sequence at every token, with the gradient of its mean."""
    return log_ratio.mean().expand_as(log_ratio)


def verl_grpo(data: Recorded, policy: Tensor) -> Tensor:
    """use_kl_loss with low_var_kl; clip_ratio_c is 3.0 where the file is silent."""
    advantages = grouped(data.batch.rewards.double(), std_eps=1e-6)
    reference = data.per_sequence(data.reference)

    def loss(n: int, lp: Tensor, old: Tensor, _: Tensor) -> Tensor:
        kept = surrogate(lp - old, advantages[n], low=0.2, high=0.28, dual=3.0)
        return kept + 0.01 * k3(reference[n], lp)

    return token_mean(losses(data, policy, loss))


def verl_rloo(data: Recorded, policy: Tensor) -> Tensor:
    """Decoupled, with a truncated weight per token; sums over the response length."""
    advantages = grouped(data.batch.rewards.double(), leave_out=True)

    def loss(n: int, lp: Tensor, old: Tensor, rollout: Tensor) -> Tensor:
        weight = (old - rollout).exp().clamp(max=1.4)
        return weight * surrogate(lp - old, advantages[n], low=0.1, high=0.1, dual=3.0)

    return sequence_sum(losses(data, policy, loss), 12)


def verl_bypass(data: Recorded, policy: Tensor) -> Tensor:
    """Dr. GRPO's advantage, the ratio to the rollout's log-probs."""
    advantages = grouped(data.batch.rewards.double())

    def loss(n: int, lp: Tensor, _: Tensor, rollout: Tensor) -> Tensor:
        return surrogate(lp - rollout, advantages[n], low=0.2, high=0.2, dual=1.5)

    return sequence_mean(losses(data, policy, loss))


def verl_gspo(data: Recorded, policy: Tensor) -> Tensor:
    """verl 0.7.0 core_algos.py:1059: the mean of sequences, whatever loss_agg_mode is."""
    advantages = grouped(data.batch.rewards.double(), std_eps=1e-6)

    def loss(n: int, lp: Tensor, old: Tensor, _: Tensor) -> Tensor:
        return surrogate(of_sequence(lp - old), advantages[n], low=3e-4, high=4e-4)

    return sequence_mean(losses(data, policy, loss))


def areal_decoupled(data: Recorded, policy: Tensor) -> Tensor:
    """Tokens whose weight is above the bound leave the sum, not the count."""
    rewards = ((data.batch.rewards.double() - 0.5) * 4).clamp(-20, 20)
    advantages = grouped(rewards)

    def loss(n: int, lp: Tensor, old: Tensor, rollout: Tensor) -> Tensor:
        weight = (old - rollout).exp()
        kept = weight * surrogate(lp - old, advantages[n], low=0.2, high=0.3, dual=3.0)
        return torch.where(weight > 1.8, 0.0, kept)

    return token_mean(losses(data, policy, loss))


def areal_returns(data: Recorded, policy: Tensor) -> Tensor:
    """No reward_norm: the return of each token, with the KL of the later ones."""
    rewards = data.batch.rewards.double()
    reference = data.per_sequence(data.reference)

    def loss(n: int, lp: Tensor, old: Tensor, _: Tensor) -> Tensor:
        paid = -0.05 * (old - reference[n]).clamp(-10, 10)
        paid[-1] = paid[-1] + rewards[n]
        advantage = torch.zeros_like(paid)
        carried = 0.0
        for t in reversed(range(len(paid))):
            carried = float(paid[t]) + 0.9 * carried
            advantage[t] = carried
        return surrogate(lp - old, advantage, low=0.2, high=0.2)

    return token_mean(losses(data, policy, loss))


def areal_cispo(data: Recorded, policy: Tensor) -> Tensor:
    """AReaL 2.0.0 cispo_loss_fn: a bounded, detached ratio as the weight of each log-prob."""
    advantages = grouped(data.batch.rewards.double())

    def loss(n: int, lp: Tensor, old: Tensor, _: Tensor) -> Tensor:
        ratio = (lp - old).exp().detach().clamp(0, 1.3)
        return -ratio * advantages[n] * lp

    return token_mean(losses(data, policy, loss))


def trl_dapo(data: Recorded, policy: Tensor) -> Tensor:
    """vLLM's weight of a sequence is masked above 3.0 where the script is silent."""
    advantages = grouped(data.batch.rewards.double())

    def loss(n: int, lp: Tensor, old: Tensor, sampled: Tensor) -> Tensor:
        weight = (old - sampled).sum().exp()
        kept = surrogate(lp - old, advantages[n], low=0.2, high=0.28)
        return kept * torch.where(weight > 3.0, 0.0, weight)

    return token_mean(losses(data, policy, loss))


def trl_grpo(data: Recorded, policy: Tensor) -> Tensor:
    """Release 0.20: beta, delta, the mean of sequences; without vLLM no weight."""
    advantages = grouped(data.batch.rewards.double())
    reference = data.per_sequence(data.reference)

    def loss(n: int, lp: Tensor, old: Tensor, _: Tensor) -> Tensor:
        ratio = (lp - old).exp()
        first = ratio.clamp(max=1.5) * advantages[n]
        kept = -torch.minimum(first, ratio.clamp(0.8, 1.2) * advantages[n])
        return kept + 0.04 * k3(reference[n], lp)

    return sequence_mean(losses(data, policy, loss))


def trl_sequence(data: Recorded, policy: Tensor) -> Tensor:
    """importance_sampling_level=sequence, dr_grpo's constant, a truncated weight."""
    advantages = grouped(data.batch.rewards.double())

    def loss(n: int, lp: Tensor, old: Tensor, sampled: Tensor) -> Tensor:
        weight = (old - sampled).sum().exp().clamp(max=1.3)
        return weight * surrogate(of_sequence(lp - old), advantages[n], low=3e-4, high=4e-4)

    return sequence_sum(losses(data, policy, loss), 12)


ORACLES: dict[str, Oracle] = {
    each.__name__: each
    for each in (
        areal_decoupled,
        areal_cispo,
        areal_returns,
        trl_dapo,
        trl_grpo,
        trl_sequence,
        verl_bypass,
        verl_gspo,
        verl_grpo,
        verl_rloo,
    )
}
CASES = table(__file__, "cases")


@pytest.mark.parametrize("case", CASES)
def test_a_migrated_file_has_the_gradient_of_its_source(tmp_path: Path, case: str) -> None:
    given = CASES[case]
    name, oracle = given["file"], ORACLES[given["oracle"]]
    (tmp_path / name).write_text(given["text"])
    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(read(tmp_path / name, release=given["release"])))
    config = compose(str(ours), ["num_steps=1", "data.train_files=[a.jsonl]"])
    data = recorded()
    found, gradient = of_product(config, data)
    policy = data.policy.clone().requires_grad_()
    expected = oracle(data, policy)
    expected.backward()
    assert policy.grad is not None
    assert found == pytest.approx(float(expected.detach()), abs=1e-6)
    difference = (gradient.double() - policy.grad).norm() / policy.grad.norm()
    assert difference < 1e-6
