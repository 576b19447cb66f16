"""A tiny random Qwen3, made-up groups, and a way to look at the gradients of a step."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from composing import compose
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.types import Branch, Group, Purpose, Score, Trajectory
from async_rl.learner.models import Policy
from async_rl.learner.optimizer import Applied, ModelOptimizer
from async_rl.learner.sharding import full_tensor
from async_rl.learner.trainer import Trainer

VOCABULARY = 50


def make_model(
    path: Path,
    *,
    hidden: int = 32,
    layers: int = 2,
    vocabulary: int = VOCABULARY,
    scale: float = 3.0,
) -> Path:
    """A random Qwen3 with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(path)
    return path


def make_config(conf: str, *overrides: str) -> RunConfig:
    small = [
        "buffer.groups_per_step=4",
        "generation.group_size=4",
        "data.max_prompt_tokens=10",
        "data.max_response_tokens=12",
    ]
    return compose(conf, [*small, "learner.optimizer.warmup_steps=0", *overrides])


def make_groups(
    seed: int = 0,
    *,
    num_groups: int = 4,
    size: int = 4,
    version: int = 0,
    ages: Sequence[int] = (0,),
    vocabulary: int = VOCABULARY,
) -> list[Group]:
    """Groups of random tokens; behavior log-probs are made up; rewards are 0 or 1, some samples are
    truncated.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        prompt = rng.integers(0, vocabulary, rng.integers(2, 9))
        trajectories = [_trajectory(rng, prompt, version, ages, vocabulary) for _ in range(size)]
        groups.append(
            Group(
                group_id=index,
                attempt=1,
                prompt_id=str(index),
                purpose=Purpose.TRAIN,
                data_source="test",
                generator="generator-0",
                admitted_version=version,
                trajectories=trajectories,
                generation_s=0.0,
            )
        )
    return groups


def _trajectory(
    rng: np.random.Generator, prompt: np.ndarray, version: int, ages: Sequence[int], vocabulary: int
) -> Trajectory:
    length = int(rng.integers(1, 12))
    ids = np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32)
    is_response = np.arange(len(ids)) >= len(prompt)
    versions = np.where(is_response, version - rng.choice(ages, len(ids)), -1)
    return Trajectory(
        token_ids=ids,
        prompt_length=len(prompt),
        loss_mask=is_response,
        behavior_logprobs=np.where(is_response, -rng.uniform(0.1, 6, len(ids)), 0).astype(
            np.float32
        ),
        versions=versions.astype(np.int32),
        is_truncated=bool(rng.random() < 0.3),
        score=Score(
            reward=float(rng.integers(0, 2)), parts={"style": 0.25}, verdicts=(), latency_s=0.0
        ),
    )


def with_branches(sample: Trajectory, branches: list[Branch]) -> Trajectory:
    """The sample as a tree. A token that follows nothing is not trained."""
    mask = sample.loss_mask.copy()
    mask[[start for start, parent in branches if parent < 0]] = False
    versions = np.where(mask, sample.versions, -1).astype(np.int32)
    logprobs = np.where(mask, sample.behavior_logprobs, 0).astype(np.float32)
    return msgspec.structs.replace(
        sample,
        branches=tuple(branches),
        loss_mask=mask,
        versions=versions,
        behavior_logprobs=logprobs,
    )


def as_trees(
    groups: Sequence[Group], rng: np.random.Generator, *, least_parent: int = -1
) -> list[Group]:
    """The samples as random trees; the prompt of some groups is one too, as agents share it."""
    in_prompt = [
        [(p // 2, int(rng.integers(least_parent, p // 2)))] if p > 3 and rng.random() < 0.4 else []
        for p in (group.trajectories[0].prompt_length for group in groups)
    ]

    def random_tree(sample: Trajectory, begin: list[Branch]) -> Trajectory:
        size = sample.response_length
        count = int(rng.integers(0, min(4, size) + 1))
        starts = sorted(rng.choice(size, count, replace=False) + sample.prompt_length)
        later = [(int(s), int(rng.integers(least_parent, s))) for s in starts]
        return with_branches(sample, [*begin, *later])

    return [
        msgspec.structs.replace(g, trajectories=[random_tree(t, begin) for t in g.trajectories])
        for g, begin in zip(groups, in_prompt, strict=True)
    ]


def paths_of(sample: Trajectory) -> list[list[int]]:
    """The positions in the sample of each token and of the tokens that it follows."""
    parents = dict(sample.branches)
    paths: list[list[int]] = []
    for at in range(len(sample.token_ids)):
        before = parents.get(at, at - 1)
        paths.append([*(paths[before] if before >= 0 else ()), at])
    return paths


def equal_rewards(groups: Sequence[Group], *, every: int, reward: float = 1.0) -> list[Group]:
    """The same groups, but every so-many-th has equal rewards, so that none of its advantages
    differs from 0.
    """

    def level(t: Trajectory) -> Trajectory:
        return msgspec.structs.replace(t, score=msgspec.structs.replace(t.score, reward=reward))

    def levelled(g: Group) -> Group:
        return msgspec.structs.replace(g, trajectories=[level(t) for t in g.trajectories])

    return [g if i % every else levelled(g) for i, g in enumerate(groups)]


def make_trainer(
    model_path: Path, conf: str, *overrides: str, rank: int = 0, world_size: int = 1
) -> Trainer:
    config = make_config(conf, *overrides)
    device = torch.device("cpu")
    return Trainer(config, model_path, rank=rank, world_size=world_size, device=device)


def offloading_trainer(model_path: Path, conf: str, *overrides: str, offload: str) -> Trainer:
    """The configuration's checks refuse offloading without a GPU; here the CPU stands for one."""
    config = make_config(conf, *overrides)
    config = replace(config, learner=replace(config.learner, offload=offload))
    return Trainer(config, model_path, rank=0, world_size=1, device=torch.device("cpu"))


def policy_of(trainer: Trainer) -> Policy:
    return trainer._policy


def optimizers_of(trainer: Trainer) -> list[ModelOptimizer]:
    return list(trainer._optimizers.values())


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of the policy's tensors."""
    return [t.clone() for t in trainer.full_tensors()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


Gradients = dict[str, list[list[torch.Tensor]]]
"""Per model, per optimizer step, per parameter."""


def spy_on_gradients(monkeypatch: pytest.MonkeyPatch, *, is_stepping: bool = True) -> Gradients:
    """Collects the gradients that every optimizer step gets; without stepping, parameters stay as
    they are.
    """
    collected: Gradients = {}
    step = ModelOptimizer.apply

    def spy(self: ModelOptimizer, loss: float, **share: float) -> Applied:
        gradients = [
            full_tensor(torch.zeros_like(p) if p.grad is None else p.grad).detach().clone()
            for p in self._parameters
        ]
        collected.setdefault(self._name, []).append(gradients)
        if is_stepping:
            return step(self, loss, **share)
        self.torch_optimizer.zero_grad(set_to_none=True)
        return Applied(1.0, 1.0)

    monkeypatch.setattr(ModelOptimizer, "apply", spy)
    return collected


def relative_difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the second."""
    pairs = [(a.double(), b.double()) for a, b in zip(first, second, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    whole = sum(float(b.square().sum()) for _, b in pairs)
    return (difference / whole) ** 0.5 if difference else 0.0


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What `varlen_attn` promises, by tensors alone, so that a graph can have it: the causal
    triangle ends at the last query and the last key.
    """
    assert enable_gqa
    assert window_size[1] == 0
    of_query, of_key = torch.arange(len(q)), torch.arange(len(k))
    q_segment, k_segment = (
        torch.bucketize(index, ends[1:], right=True)
        for index, ends in ((of_query, queries), (of_key, keys))
    )
    q_left = (queries[1:][q_segment] - of_query)[:, None]
    k_left = (keys[1:][k_segment] - of_key)[None]
    # Wrong if a graph kept the longest segment of another row.
    fits = (q_left <= max_q) & (k_left <= max_k)
    age = k_left - q_left
    seen = (q_segment[:, None] == k_segment[None]) & (age >= 0) & fits
    if window_size[0] != -1:
        seen = seen & (age <= window_size[0])
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
