"""A whole learner step in float64, one sequence at a time: nothing packed, nothing shared, no code
of the product.

The recorded parameters before each update are given to it, so it needs no optimizer. Its numbers
are written in the tests and not read from conf/.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_support import as_trees, paths_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from async_rl.core.types import Group, Score, Trajectory
from async_rl.learner.forward_passes import Minibatch
from async_rl.learner.metrics import Step
from async_rl.learner.sharding import full_tensor
from async_rl.learner.trainer import Trainer
from async_rl.learner.update import Updater


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective in numbers. kl_in_reward, kl_in_loss: weights of k1 and of `kl_estimator`."""

    advantage: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    normalize: str = "none"
    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = None
    max_mean_ratio: float = np.inf
    correction: str = "token_tis"
    weight_max: float = 2.0
    weight_min: float = 0.0
    geometric_max: float = np.inf
    geometric_min: float = 0.0
    max_shift: float = 0.2
    max_moment: float = 0.04
    beta: float = 1.0
    aggregation: str = "token_mean"
    aggregation_tokens: int = 12
    kl_in_reward: float = 0.0
    kl_in_loss: float = 0.0
    kl_estimator: str = "k3"
    value_coef: float = 0.5
    value_clip: float | None = None
    has_shared_critic: bool = False
    entropy_coef: float = 0.0
    masks_truncated: bool = False
    bootstraps_truncated: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update as the product planned it: its sequences, and all parameters before it."""

    sequences: list[int]
    policy: list[Tensor]
    critic: list[Tensor]


def record_updates(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """Collect the updates of the next steps of all trainers."""
    updates: list[Update] = []
    update = Updater._update
    models = trainer._models

    def clones(module: nn.Module | None) -> list[Tensor]:
        if module is None:
            return []
        return [full_tensor(p).detach().clone() for p in module.parameters()]

    def spy(self: Updater, step: Step, minibatch: Minibatch) -> None:
        policy = clones(models.policy.lm)
        critic = clones(models.critic or models.policy.value_head)
        updates.append(Update(sequences=list(minibatch.sequences), policy=policy, critic=critic))
        update(self, step, minibatch)

    monkeypatch.setattr(Updater, "_update", spy)
    return updates


def conversations(groups: Sequence[Group], scorer: Trainer) -> list[Group]:
    """The groups with behavior log-probs near the scorer's, and with tokens that an environment
    wrote: in the middle of some responses, at the end of others. They have no log-prob and no
    version, as the rollout writes them. The samples are trees, as those of agents.
    """
    rng = np.random.default_rng(5)
    groups = as_trees(groups, rng, least_parent=0)
    scored_rows = iter(scorer.logprobs([t.token_ids for g in groups for t in g.trajectories]))

    def turned(t: Trajectory) -> Trajectory:
        mask = t.loss_mask.copy()
        num_read = int(rng.integers(0, max(1, t.response_length - 1)))
        start = t.prompt_length + int(rng.integers(1, t.response_length - num_read + 1))
        mask[start : start + num_read] = False
        noise = rng.normal(scale=0.4, size=len(mask))
        near = next(scored_rows) + noise
        return msgspec.structs.replace(
            t,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, near, 0).astype(np.float32),
            versions=np.where(mask, t.versions, -1).astype(np.int32),
        )

    def scored(t: Trajectory) -> Trajectory:
        reward = float(rng.integers(0, 4)) / 2
        return msgspec.structs.replace(
            t, score=Score(reward=reward, parts={}, verdicts=(), latency_s=0.0)
        )

    return [
        msgspec.structs.replace(
            group,
            trajectories=[scored(turned(t)) for t in group.trajectories],
            baseline=scored(group.trajectories[0]),
        )
        for group in groups
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory with what the models said before the first update."""

    group: int
    t: Trajectory
    mask: Tensor
    proximal: Tensor
    reference: Tensor
    behavior: Tensor
    values: list[float]


class StepOracle:
    """The gradients of every update of one step."""

    def __init__(
        self, path: Path, groups: Sequence[Group], first: Update, objective: Objective
    ) -> None:
        self._objective = objective
        self._groups = groups
        self._reference = _model(path)
        self._policy = copy.deepcopy(self._reference)
        self._backbone = self._policy.model
        if not objective.has_shared_critic:
            self._backbone = copy.deepcopy(self._reference.model)
        hidden = self._reference.config.hidden_size
        self._head = nn.Linear(hidden, 1, dtype=torch.float64)
        self._of_inputs = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))
        self._load(first)
        self._samples = [
            self._sample(index, t) for index, group in enumerate(groups) for t in group.trajectories
        ]
        self._advantages, self._returns = self._targets()

    def gradients(self, update: Update) -> Mapping[str, list[Tensor]]:
        """The gradients of policy and critic in one update."""
        self._load(update)
        objective = self._objective
        loss = torch.zeros((), dtype=torch.float64)
        members = [self._samples[i] for i in update.sequences]
        trained = [s for s in members if bool(s.mask.any())]
        num_tokens = sum(int(s.mask.sum()) for s in trained)
        for sample in trained:
            length = int(sample.mask.sum())
            share = {
                "token_mean": 1 / num_tokens,
                "sequence_mean": 1 / (len(trained) * length),
                "sequence_sum": 1 / (len(trained) * objective.aggregation_tokens),
            }[objective.aggregation]
            index = next(i for i, s in enumerate(self._samples) if s is sample)
            losses = self._losses(sample, self._advantages[index])
            loss = loss + share * losses[sample.mask].sum()
            if update.critic:
                errors = self._value_errors(sample, self._returns[index])[sample.mask]
                loss = loss + objective.value_coef * share * 0.5 * errors.sum()
        loss.backward()
        return {
            "policy": [p.grad for p in self._policy.parameters()],
            "critic": [torch.zeros(()) if p.grad is None else p.grad for p in self._critic()],
        }

    def _value_errors(self, sample: Sample, returns: Tensor) -> Tensor:
        values = self._values(sample.t)[:-1]
        clip = self._objective.value_clip
        if clip is None:
            return (values - returns).square()
        old = torch.tensor(sample.values[:-1], dtype=torch.float64)
        near = old + (values - old).clamp(-clip, clip)
        return torch.maximum((values - returns).square(), (near - returns).square())

    def _critic(self) -> list[nn.Parameter]:
        own = [] if self._objective.has_shared_critic else [*self._backbone.parameters()]
        return [*own, *self._head.parameters(), self._of_inputs]

    def kl_per_sequence(self) -> float:
        """Nats of the exact KL(proximal, reference), over the written tokens."""
        total = 0.0
        with torch.no_grad():
            for s in self._samples:
                p, q = (_distribution(m, s.t) for m in (self._policy, self._reference))
                total += float((p.exp() * (p - q)).sum(-1)[torch.from_numpy(_written(s.t))].sum())
        return total / len(self._samples)

    def _load(self, update: Update) -> None:
        critic = self._critic()
        pairs = [*zip(self._policy.parameters(), update.policy, strict=True)]
        if update.critic:
            pairs += zip(critic, update.critic, strict=True)
        with torch.no_grad():
            for parameter, value in pairs:
                parameter.copy_(value)
        for parameter in (*self._policy.parameters(), *critic):
            parameter.grad = None

    def _sample(self, group: int, t: Trajectory) -> Sample:
        start = t.prompt_length
        mask = torch.from_numpy(_written(t))
        if self._objective.masks_truncated and t.is_truncated:
            mask = torch.zeros_like(mask)
        objective = self._objective
        with torch.no_grad():
            proximal = _logprobs(self._policy, t)[0]
            return Sample(
                group=group,
                t=t,
                mask=mask,
                proximal=proximal,
                reference=(
                    _logprobs(self._reference, t)[0]
                    if objective.kl_in_reward or objective.kl_in_loss
                    else proximal
                ),
                behavior=torch.from_numpy(t.behavior_logprobs[start:]).double(),
                values=(
                    self._values(t).tolist() if objective.advantage in ("gae", "vtrace") else []
                ),
            )

    def _values(self, t: Trajectory) -> Tensor:
        """The values before every response token and after the last one."""
        states = _by_token(t, lambda ids: self._backbone(ids, use_cache=False).last_hidden_state)
        at = [*_followed(t), len(t.token_ids) - 1]
        inputs = torch.tensor([_value_inputs(t, path) for path in (paths_of(t)[i] for i in at)])
        scaled = self._head.in_features / 4 * inputs.double()
        return (self._head(states[at]) + scaled @ self._of_inputs.t())[:, 0]

    def _losses(self, sample: Sample, advantages: Tensor) -> Tensor:
        objective = self._objective
        logprobs, entropies = _logprobs(self._policy, sample.t)
        weight = self._weights(sample)
        anchor = sample.behavior if objective.loss == "ppo_vanilla" else sample.proximal
        log_ratio = logprobs - anchor
        if log_ratio.exp()[sample.mask].mean() > objective.max_mean_ratio:
            return 0 * logprobs
        if objective.loss == "gspo":
            mean = log_ratio[sample.mask].mean()
            # Each token has the value of the sequence and its own share of the gradient.
            log_ratio = mean.detach() + log_ratio - log_ratio.detach()
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        if objective.loss in ("sapo", "dppo", "vespo", "oapl"):
            losses = self._off_policy_losses(sample, logprobs, advantages)
        elif objective.loss == "cispo":
            losses = -weight * bounded.detach() * advantages * logprobs
        elif objective.loss == "reinforce":
            losses = -weight * advantages * logprobs
        else:
            gain = torch.minimum(ratio * advantages, bounded * advantages)
            if objective.clip_dual is not None:
                floor = torch.where(advantages < 0, objective.clip_dual * advantages, -np.inf)
                gain = torch.maximum(gain, floor)
            losses = -weight * gain
        if objective.kl_in_loss:
            losses = losses + objective.kl_in_loss * self._kl(sample, logprobs, weight)
        return losses - objective.entropy_coef * entropies

    def _kl(self, sample: Sample, logprobs: Tensor, weight: Tensor) -> Tensor:
        d = logprobs - sample.reference
        if self._objective.kl_estimator == "full":
            p, q = (_distribution(m, sample.t) for m in (self._policy, self._reference))
            return (p.exp() * (p - q.detach())).sum(-1)
        return weight * ((-d).exp() - 1 + d)

    def _off_policy_losses(self, sample: Sample, logprobs: Tensor, advantages: Tensor) -> Tensor:
        objective, mask = self._objective, sample.mask
        if objective.loss == "sapo":
            u = (logprobs - sample.proximal).exp()
            tau = torch.tensor([1.0 if a > 0 else 1.05 for a in advantages.tolist()]).double()
            gate = 4 / tau / (1 + (-tau * (u - 1)).exp())
            return -self._weights(sample) * gate * advantages
        ratio = (logprobs - sample.behavior).exp()
        if objective.loss == "dppo":
            shift = (logprobs.exp() - sample.behavior.exp()) * torch.where(advantages > 0, 1, -1)
            return -ratio * advantages * (shift <= objective.max_shift)
        whole = ratio[mask].log().sum()
        if objective.loss == "oapl":
            # The paper's square, a share of it at each token.
            return (
                (objective.beta * whole - advantages).square() / (2 * objective.beta)
            ) / mask.sum()
        w = whole.detach().exp()
        k, rate = (2, 3) if float(advantages[mask][0]) >= 0 else (3, 2)
        return -(w**k) * (rate - rate * w).exp() * advantages * logprobs

    def _largest_log_ratio(self) -> float:
        """Of the tokens that M2PO keeps: sort them, and drop the largest while the mean is high."""
        squares = torch.cat([(s.proximal - s.behavior)[s.mask].square() for s in self._samples])
        kept = sorted(squares.tolist())
        while kept and sum(kept) / len(kept) >= self._objective.max_moment:
            kept.pop()
        return float(np.sqrt(kept[-1])) * (1 + 1e-9)

    def _weights(self, sample: Sample) -> Tensor:
        """The behavior weights by their definition, over the written tokens alone."""
        objective = self._objective
        log_ratio = (sample.proximal - sample.behavior)[sample.mask]
        weight = log_ratio.exp()
        if objective.correction == "none":
            weight = torch.ones_like(weight)
        if objective.correction == "m2po":
            weight = weight.masked_fill(log_ratio.abs() > self._largest_log_ratio(), 0)
        if objective.correction.startswith("sequence"):
            weight = log_ratio.sum().exp().expand(len(log_ratio))
        if objective.correction.endswith("tis"):
            weight = weight.clamp(max=objective.weight_max)
        if objective.correction.endswith("mis"):
            is_outside = (weight > objective.weight_max) | (weight < objective.weight_min)
            weight = weight.masked_fill(is_outside, 0)
        mean = float(log_ratio.mean().exp())
        if mean > objective.geometric_max or mean < objective.geometric_min:
            weight = torch.zeros_like(weight)
        spread = torch.zeros(len(sample.mask), dtype=torch.float64)
        spread[sample.mask] = weight
        return spread

    def _targets(self) -> tuple[list[Tensor], list[Tensor]]:
        raw, returns = zip(*(self._raw(sample) for sample in self._samples), strict=True)
        return self._normalized(list(raw)), list(returns)

    def _raw(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the written tokens, 0 elsewhere."""
        objective, t = self._objective, sample.t
        written = np.flatnonzero(_written(t)).tolist()
        rewards = self._rewards(sample)
        advantages = torch.zeros(t.response_length, dtype=torch.float64)
        returns = torch.zeros_like(advantages)
        if objective.advantage not in ("gae", "vtrace"):
            advantages[written] = self._compared(sample)
            return advantages, returns
        has_more = t.is_truncated and objective.bootstraps_truncated
        value, carried = (sample.values[-1] if has_more else 0.0), 0.0
        if objective.advantage == "vtrace":
            target = value
            for i in reversed(written):
                w = min(1.0, float((sample.proximal - sample.behavior)[i].exp()))
                advantages[i] = rewards[i] + objective.gamma * target - sample.values[i]
                error = rewards[i] + objective.gamma * value - sample.values[i]
                traced = objective.gamma * objective.lam * w * (target - value)
                target, value = sample.values[i] + w * error + traced, sample.values[i]
                returns[i] = target
            return advantages, returns
        for i in reversed(written):
            delta = rewards[i] + objective.gamma * value - sample.values[i]
            carried = delta + objective.gamma * objective.lam * carried
            value = sample.values[i]
            advantages[i], returns[i] = carried, carried + value
        return advantages, returns

    def _rewards(self, sample: Sample) -> dict[int, float]:
        """The rewards of the written tokens: the KL at each, the score at the last."""
        kl = self._objective.kl_in_reward * (sample.proximal - sample.reference)
        written = np.flatnonzero(_written(sample.t)).tolist()
        rewards = {i: -float(kl[i]) for i in written}
        if not (self._objective.bootstraps_truncated and sample.t.is_truncated):
            rewards[written[-1]] += sample.t.score.reward
        return rewards

    def _compared(self, sample: Sample) -> float:
        """The advantage of a whole response over others of its group."""
        reward = sum(self._rewards(sample).values())
        group = self._groups[sample.group]
        members = [
            sum(self._rewards(member).values())
            for member in self._samples
            if member.group == sample.group
            and not (self._objective.masks_truncated and member.t.is_truncated)
        ]
        if self._objective.advantage == "reinforce_plus_plus":
            return reward
        if self._objective.advantage == "remax":
            assert group.baseline is not None
            return reward - group.baseline.score.reward
        if len(members) < 2:
            return 0.0
        mean = float(np.mean(members))
        return {
            "grpo": (reward - mean) / (float(np.std(members, ddof=1)) + 1e-6),
            "dr_grpo": reward - mean,
            "oapl": reward - float(np.log(np.mean(np.exp(np.array(members))))),
            "rloo": (reward - mean) * len(members) / (len(members) - 1),
        }[self._objective.advantage]

    def _normalized(self, raw: list[Tensor]) -> list[Tensor]:
        if self._objective.normalize == "none":
            return raw
        pairs = zip(raw, self._samples, strict=True)
        flat = torch.cat([advantages[s.mask] for advantages, s in pairs])
        mean, std = flat.mean(), flat.std(correction=0)
        return [(advantages - mean) / (std + 1e-5) for advantages in raw]


@functools.cache
def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def _written(t: Trajectory) -> np.ndarray:
    return t.loss_mask[t.prompt_length :]


def _value_inputs(t: Trajectory, path: Sequence[int]) -> list[float]:
    """What the head reads at the end of a path, of responses of at most 12 tokens."""
    surprise = [-float(t.behavior_logprobs[i]) if t.loss_mask[i] else 0.0 for i in path]
    unlikely = [1 - math.exp(-nats) for nats in surprise]
    num_tokens = sum(i >= t.prompt_length for i in path)
    return [num_tokens / 12, unlikely[-1], max(unlikely), math.log(1 + sum(surprise))]


def _logprobs(model: nn.Module, t: Trajectory) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and entropies where they were sampled."""
    logp = _distribution(model, t)
    ids = torch.from_numpy(t.token_ids).long()[t.prompt_length :, None]
    return logp.gather(1, ids)[:, 0], -(logp.exp() * logp).sum(-1)


def _distribution(model: nn.Module, t: Trajectory) -> Tensor:
    """Log-probs of every next token of the response: [L, V]."""
    logits = _by_token(t, lambda ids: model(ids, use_cache=False).logits)
    return torch.log_softmax(logits[_followed(t)], -1)


def _followed(t: Trajectory) -> list[int]:
    """The token that each response token follows."""
    parents = dict(t.branches)
    return [parents.get(at, at - 1) for at in range(t.prompt_length, len(t.token_ids))]


def _by_token(t: Trajectory, run: Callable[[Tensor], Tensor]) -> Tensor:
    """What a model says at each token: a row for each branch, with all that it follows. What pads a
    row comes after its tokens, so none of them sees it.
    """
    ids = torch.from_numpy(t.token_ids).long()
    paths = paths_of(t)
    spans = list(itertools.pairwise([0, *(start for start, _ in t.branches), len(ids)]))
    rows = [ids[paths[end - 1]] for _, end in spans]
    said = run(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    pairs = zip(said, rows, spans, strict=True)
    return torch.cat([of[len(row) - (end - start) : len(row)] for of, row, (start, end) in pairs])
