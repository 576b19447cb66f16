"""A whole step under each objective: its gradient equals that of a slow float64 model that knows
one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import (
    make_groups,
    make_model,
    make_trainer,
    relative_difference,
    spy_on_gradients,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.core.types import Group, Trajectory
from async_rl.examples.losses import geometric


class Oracle:
    """The model in float64 and the formulas in loops."""

    def __init__(self, model_path: Path, groups: Sequence[Group]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
        self.groups = groups
        self.trajectories = [t for g in groups for t in g.trajectories]
        self.num_tokens = sum(t.response_length for t in self.trajectories)

    def distribution(self, t: Trajectory) -> Tensor:
        """log p of every next token of the response: [L, V]."""
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
        return torch.log_softmax(
            self.model(input_ids=ids, use_cache=False).logits[0, t.prompt_length - 1 : -1], -1
        )

    def logprobs(self, t: Trajectory) -> Tensor:
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[t.prompt_length :, None]
        return self.distribution(t).gather(1, ids).squeeze(1)

    def advantage(self, t: Trajectory) -> float:
        """Dr. GRPO's: less the mean of the group."""
        group = next(g for g in self.groups if any(t is member for member in g.trajectories))
        return t.score.reward - float(np.mean([m.score.reward for m in group.trajectories]))

    def behavior(self, t: Trajectory) -> Tensor:
        return torch.from_numpy(t.behavior_logprobs[t.prompt_length :]).double()

    def gradients(self, loss: Tensor) -> list[Tensor]:
        loss.backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def close_groups(model_path: Path) -> list[Group]:
    """Groups whose behavior log-probs are near those of the model, so that weights vary within and
    beyond their bounds.
    """
    groups = make_groups()
    rng = np.random.default_rng(3)
    scorer = make_trainer(model_path, "grpo_code")
    for t in (t for g in groups for t in g.trajectories):
        near = scorer.logprobs([t.token_ids])[0] + rng.normal(scale=0.3, size=len(t.token_ids))
        t.behavior_logprobs[:] = np.where(t.loss_mask, near, 0)
    return groups


def correction_oracle(log_ratio: Tensor, kind: str, *, maximum: float = 2.0) -> Tensor:
    """Weights at the bounds maximum and 0.5; log_ratio of one sequence."""
    if kind == "none":
        return torch.ones_like(log_ratio)
    weight = (
        log_ratio.exp()
        if kind.startswith("token")
        else log_ratio.sum().exp().expand(len(log_ratio))
    )
    return (
        weight.clamp(max=maximum)
        if kind.endswith("tis")
        else torch.where((weight > maximum) | (weight < 0.5), 0.0, weight)
    )


KNOBS = ("algorithm.advantage=dr_grpo", "buffer.max_staleness_versions=0")


@pytest.mark.proves(
    "algorithm.policy_loss.correction",
    "algorithm.policy_loss.correction.max",
    "algorithm.policy_loss.correction.min",
)
@pytest.mark.parametrize("kind", ["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
def test_on_the_first_update_every_loss_is_the_weighted_policy_gradient(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, kind: str
) -> None:
    """Where policy and proximal policy are one, all ratios are 1: the losses differ in later
    updates only.
    """
    groups = close_groups(model_path)
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    bounds = {"min": 0.5, "max": 1.5} if kind.endswith("mis") else {"max": 1.5}
    if kind == "none":
        bounds = {}
    knobs = (
        f"algorithm.policy_loss={loss}",
        f"algorithm.policy_loss.correction={kind}",
        *(f"algorithm.policy_loss.correction.{name}={value}" for name, value in bounds.items()),
    )
    result = make_trainer(model_path, "grpo_code", *KNOBS, *knobs).step(groups, 0)
    oracle = Oracle(model_path, groups)
    total = torch.zeros((), dtype=torch.float64)
    for t in oracle.trajectories:
        logprobs = oracle.logprobs(t)
        log_ratio = logprobs.detach() - oracle.behavior(t)
        weight = correction_oracle(log_ratio, kind, maximum=1.5)
        total = total - (weight * oracle.advantage(t) * logprobs).sum() / oracle.num_tokens
    assert relative_difference(collected["policy"][0], oracle.gradients(total)) < 1e-5
    assert result.scalars["policy/kl_proximal_policy"] == 0.0
    assert (result.scalars["policy/behavior_weight_clipped_share"] > 0) == (kind != "none")


def second_update_oracle(oracle: Oracle, first: Oracle, loss: str) -> Tensor:
    """first: the model before the first update; oracle: after it."""
    terms = []
    for t in oracle.trajectories:
        logprobs, proximal, advantage = (
            oracle.logprobs(t),
            first.logprobs(t).detach(),
            oracle.advantage(t),
        )
        weight = (proximal - oracle.behavior(t)).exp().clamp(max=2.0)
        anchor = proximal
        if loss == "ppo_vanilla":
            weight, anchor = torch.ones_like(proximal), oracle.behavior(t)
        ratio = (logprobs - anchor).exp()
        if loss == "gspo":
            weight = correction_oracle(proximal - oracle.behavior(t), "sequence_tis")
            ratio = (logprobs - anchor).mean().exp()
        if loss == "cispo":
            surrogate = ratio.detach().clamp(0.98, 1.03) * advantage * logprobs
        else:
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.03) * advantage)
        terms.append((weight * surrogate).sum())
    return -torch.stack(terms).sum() / oracle.num_tokens


@pytest.mark.proves(
    "algorithm.policy_loss",
    "algorithm.policy_loss.clip_low",
    "algorithm.policy_loss.clip_high",
    "learner.epochs",
)
@pytest.mark.covers("decoupled objective", "ppo_epochs")
@pytest.mark.parametrize("loss", ["ppo", "ppo_vanilla", "gspo", "cispo"])
def test_the_second_update_of_a_batch_equals_the_formula(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    groups = close_groups(model_path)
    collected = spy_on_gradients(monkeypatch)
    correction = {"ppo_vanilla": "none", "gspo": "sequence_tis"}.get(loss, "token_tis")
    knobs = (
        *KNOBS,
        "learner.optimizer.lr=3e-3",
        "algorithm.policy_loss.clip_low=0.02",
        "algorithm.policy_loss.clip_high=0.03",
        f"algorithm.policy_loss={loss}",
        f"algorithm.policy_loss.correction={correction}",
    )
    trainer = make_trainer(model_path, "grpo_code", *knobs, "learner.epochs=2")
    result = trainer.step(groups, 0)
    assert result.scalars["policy/clip_fraction"] > 0.01
    halfway = make_trainer(model_path, "grpo_code", *knobs)
    halfway.step(groups, 0)
    halfway.export_hf(tmp_path / "halfway")
    oracle, first = Oracle(tmp_path / "halfway", groups), Oracle(model_path, groups)
    assert (
        relative_difference(
            collected["policy"][1], oracle.gradients(second_update_oracle(oracle, first, loss))
        )
        < 1e-4
    )


@pytest.mark.proves("algorithm.aggregation", "algorithm.aggregation.tokens")
@pytest.mark.parametrize(
    ("aggregation", "share"), [("token_mean", None), ("sequence_mean", None), ("sequence_sum", 12)]
)
def test_aggregations_weigh_tokens_as_their_formulas_say(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str, share: int | None
) -> None:
    groups = close_groups(model_path)
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    knobs = [f"algorithm.aggregation={aggregation}"]
    if share is not None:
        knobs.append(f"algorithm.aggregation.tokens={share}")
    make_trainer(
        model_path, "grpo_code", *KNOBS, "algorithm.policy_loss.correction=none", *knobs
    ).step(groups, 0)
    oracle = Oracle(model_path, groups)
    total = torch.zeros((), dtype=torch.float64)
    for t in oracle.trajectories:
        weight = {
            "token_mean": 1 / oracle.num_tokens,
            "sequence_mean": 1 / (len(oracle.trajectories) * t.response_length),
            "sequence_sum": 1 / (len(oracle.trajectories) * 12),
        }[aggregation]
        total = total - weight * oracle.advantage(t) * oracle.logprobs(t).sum()
    assert relative_difference(collected["policy"][0], oracle.gradients(total)) < 1e-5


@pytest.mark.proves("algorithm.kl.estimator", "algorithm.kl.coef")
@pytest.mark.parametrize("estimator", ["abs", "k2", "k3", "full"])
@pytest.mark.parametrize("budget", [8192, 40])
def test_the_kl_in_the_loss_pulls_back_to_the_reference(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str, budget: int
) -> None:
    """The second step's gradient: the policy has left the reference by then. Rewards are equal, so
    that the KL is the whole loss.
    """
    groups = close_groups(model_path)
    knobs = (
        *KNOBS,
        "learner.optimizer.lr=1e-2",
        "algorithm.kl=loss",
        "algorithm.kl.coef=0.5",
        f"algorithm.kl.estimator={estimator}",
    )
    trainer = make_trainer(
        model_path,
        "grpo_code",
        *knobs,
        "algorithm.policy_loss.correction=none",
        f"learner.budget_tokens={budget}",
    )
    trainer.step(groups, 0)
    trainer.export_hf(tmp_path / "moved")
    for t in (t for g in groups for t in g.trajectories):
        t.versions[t.loss_mask] = 1
    equal = [make_equal(g) for g in groups]
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    trainer.step(equal, 1)
    oracle, reference = Oracle(tmp_path / "moved", equal), Oracle(model_path, equal)
    total = torch.zeros((), dtype=torch.float64)
    for t in oracle.trajectories:
        d = oracle.logprobs(t) - reference.logprobs(t).detach()
        p, q = oracle.distribution(t), reference.distribution(t).detach()
        kl = {
            "abs": d.abs(),
            "k2": d**2 / 2,
            "k3": (-d).exp() - 1 + d,
            "full": (p.exp() * (p - q)).sum(-1),
        }[estimator]
        total = total + 0.5 * kl.sum() / oracle.num_tokens
    assert relative_difference(collected["policy"][0], oracle.gradients(total)) < 1e-4


def make_equal(group: Group) -> Group:
    import msgspec

    def worth_1(t: Trajectory) -> Trajectory:
        return msgspec.structs.replace(t, score=msgspec.structs.replace(t.score, reward=1.0))

    return msgspec.structs.replace(group, trajectories=[worth_1(t) for t in group.trajectories])


@pytest.mark.proves("algorithm.policy_loss.max_mean_ratio")
@pytest.mark.covers("early_stop_imp_ratio")
def test_sequences_whose_mean_ratio_is_too_high_are_left_out_and_counted(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = close_groups(model_path)
    knobs = (*KNOBS, "algorithm.policy_loss=ppo_vanilla", "algorithm.policy_loss.correction=none")
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    result = make_trainer(
        model_path, "grpo_code", *knobs, "algorithm.policy_loss.max_mean_ratio=1.1"
    ).step(groups, 0)
    oracle = Oracle(model_path, groups)
    total, left_out = torch.zeros((), dtype=torch.float64), 0
    for t in oracle.trajectories:
        ratio, advantage = (oracle.logprobs(t) - oracle.behavior(t)).exp(), oracle.advantage(t)
        if float(ratio.mean().detach()) > 1.1:
            left_out += t.response_length
            continue
        total = (
            total
            - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
            / oracle.num_tokens
        )
    assert 0 < left_out < oracle.num_tokens
    assert result.scalars["policy/left_out_share"] == pytest.approx(left_out / oracle.num_tokens)
    assert relative_difference(collected["policy"][0], oracle.gradients(total)) < 1e-5
    assert (
        make_trainer(model_path, "grpo_code", *knobs)
        .step(groups, 0)
        .scalars["policy/left_out_share"]
        == 0.0
    )


def test_the_geometric_mask_takes_whole_sequences_out(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = close_groups(model_path)
    oracle = Oracle(model_path, groups)
    means = [
        float((oracle.logprobs(t).detach() - oracle.behavior(t)).mean().exp())
        for t in oracle.trajectories
    ]
    lengths = [t.response_length for t in oracle.trajectories]

    def masked(maximum: float, minimum: float) -> float:
        monkeypatch.setattr(geometric, "CAP", math.inf)
        monkeypatch.setattr(geometric, "MAXIMUM", maximum)
        monkeypatch.setattr(geometric, "MINIMUM", minimum)
        trainer = make_trainer(model_path, "grpo_code", "algorithm=geometric", *KNOBS)
        return trainer.step(groups, 0).scalars["policy/behavior_weight_clipped_share"]

    high = sum(n for m, n in zip(means, lengths, strict=True) if m > 1.1) / sum(lengths)
    low = sum(n for m, n in zip(means, lengths, strict=True) if m < 0.9) / sum(lengths)
    assert masked(math.inf, 0.0) == 0.0
    assert masked(1.1, 0.0) == pytest.approx(high)
    assert masked(math.inf, 0.9) == pytest.approx(low)
    assert masked(1.1, 0.9) == pytest.approx(high + low)


PPO = (
    "learner.minibatches=1",
    "algorithm.kl.coef=0.3",
    "algorithm.advantage.gamma=0.9",
    "algorithm.advantage.gae_lambda=0.8",
)


@pytest.mark.proves(
    "algorithm.advantage", "algorithm.advantage.gamma", "algorithm.advantage.gae_lambda"
)
@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_a_ppo_step_with_critic_reference_and_kl_in_the_reward_equals_the_oracle(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advantage: str
) -> None:
    """The second step: by then policy, critic and reference differ. The policy gradient is
    compared.
    """
    reference_path = make_model(tmp_path / "start", scale=2.0)
    groups = close_groups(reference_path)
    knobs = (
        *PPO,
        f"algorithm.advantage={advantage}",
        "learner.optimizer.lr=1e-2",
        "algorithm.advantage.critic.lr=1e-2",
    )
    trainer = make_trainer(reference_path, "ppo_code", *knobs)
    trainer.step(groups, 0)
    trainer.export_hf(tmp_path / "moved")
    for t in (t for g in groups for t in g.trajectories):
        t.versions[t.loss_mask] = 1
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    trainer.step(groups, 1)
    oracle, reference = Oracle(tmp_path / "moved", groups), Oracle(reference_path, groups)
    values = critic_values(trainer, groups)
    advantages = [
        token_advantages(
            (-0.3 * (oracle.logprobs(t) - reference.logprobs(t))).detach().tolist(),
            t,
            values[id(t)],
            (oracle.logprobs(t).detach() - oracle.behavior(t)).exp().tolist(),
            advantage,
        )
        for t in oracle.trajectories
    ]
    flat = torch.tensor([a for row in advantages for a in row], dtype=torch.float64)
    mean, std = flat.mean(), flat.std(correction=0)
    total = torch.zeros((), dtype=torch.float64)
    for t, row in zip(oracle.trajectories, advantages, strict=True):
        logprobs = oracle.logprobs(t)
        weight = (logprobs.detach() - oracle.behavior(t)).exp().clamp(max=2.0)
        normalized = (torch.tensor(row, dtype=torch.float64) - mean) / (std + 1e-5)
        total = total - (weight * normalized * logprobs).sum() / oracle.num_tokens
    assert relative_difference(collected["policy"][0], oracle.gradients(total)) < 1e-4


def critic_values(trainer: object, groups: Sequence[Group]) -> dict[int, list[float]]:
    """Values before each response token and after the last, of each trajectory, one at a time."""
    from async_rl.batching.batch import collate
    from async_rl.batching.packing import pack

    critic = trainer._models.critic  # type: ignore[attr-defined]
    found = {}
    for group in groups:
        batch = collate([group], device=torch.device("cpu"))
        for i, t in enumerate(group.trajectories):
            with torch.no_grad():
                here, after = critic(pack(batch, [i], device=torch.device("cpu")))
            found[id(t)] = [*here.tolist(), after.item()]
    return found


def token_advantages(
    rewards: list[float], t: Trajectory, values: list[float], weights: list[float], kind: str
) -> list[float]:
    """GAE as a double sum; V-trace by its recursion. gamma 0.9, lambda 0.8."""
    n = len(rewards)
    rewards = [r + (t.score.reward if i == n - 1 else 0.0) for i, r in enumerate(rewards)]
    values = [*values[:n], 0.0]
    deltas = [rewards[i] + 0.9 * values[i + 1] - values[i] for i in range(n)]
    if kind == "gae":
        return [sum((0.9 * 0.8) ** (k - i) * deltas[k] for k in range(i, n)) for i in range(n)]
    traced = [
        values[i]
        + sum(
            0.9 ** (k - i)
            * math.prod(0.8 * min(1.0, w) for w in weights[i:k])
            * min(1.0, weights[k])
            * deltas[k]
            for k in range(i, n)
        )
        for i in range(n)
    ]
    following = [*traced[1:], values[n]]
    return [rewards[i] + 0.9 * following[i] - values[i] for i in range(n)]
