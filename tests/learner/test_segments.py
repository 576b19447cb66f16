"""A sample that is a tree, in a packed row: each token is computed as in a row of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import as_trees, make_groups, paths_of, relative_difference, with_branches
from test_attention import seen_by
from torch import Tensor

from async_rl.algorithms.losses import token_weights
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.buffer.checks import check_group
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Branch, Group, Trajectory
from async_rl.learner import cpu_attention
from async_rl.learner.loading import load_policy
from async_rl.learner.models import Policy

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 3),
    size=st.integers(1, 4),
    with_ends=st.booleans(),
)
def test_a_token_sees_what_it_follows(
    seed: int, num_groups: int, size: int, with_ends: bool
) -> None:
    groups = make_groups(seed, num_groups=num_groups, size=size)
    groups = as_trees(groups, np.random.default_rng(seed))
    batch = collate_part(whole(groups), device=CPU)
    row = pack(batch, range(batch.num_sequences), device=CPU, with_ends=with_ends)
    seen = seen_by(row.segments)
    assert len(seen) == row.input_ids.numel()
    ids, positions = row.input_ids[0], row.position_ids[0]
    number = 0
    for sample in (t for g in groups for t in g.trajectories):
        paths = paths_of(sample)
        for t in range(sample.prompt_length, len(sample.token_ids)):
            if sample.loss_mask[t]:
                at = seen[int(row.predict_index[number])]
                assert ids[at].tolist() == sample.token_ids[paths[t][:-1]].tolist()
                assert positions[at].tolist() == list(range(len(paths[t]) - 1))
            assert row.target_ids[number] == sample.token_ids[t]
            number += 1


def apart(sample: Trajectory) -> list[Trajectory]:
    """A row of its own for each trained token of a tree, which trains this token only."""
    rows = []
    for path in paths_of(sample):
        kept = np.array(path)
        is_last = kept == kept[-1]
        if sample.loss_mask[kept[-1]]:
            rows.append(
                msgspec.structs.replace(
                    sample,
                    token_ids=sample.token_ids[kept],
                    prompt_length=1,
                    loss_mask=is_last,
                    behavior_logprobs=sample.behavior_logprobs[kept],
                    versions=np.where(is_last, sample.versions[kept], -1),
                    branches=(),
                )
            )
    return rows


def gradients(policy: Policy, samples: list[Trajectory], pulls: Iterator[float]) -> list[Tensor]:
    """Of the log-probs of all trained tokens, each times its pull."""
    batch = collate_part(whole([_group(samples)]), device=CPU)
    row = pack(batch, range(len(samples)), device=CPU, with_ends=False)
    logprobs = policy(row, temperature=1.0, chunk_tokens=1024).logprobs
    policy.zero_grad()
    for at in torch.nonzero(batch.loss_mask[row.token_index]):
        logprobs[at].mul(next(pulls)).sum().backward(retain_graph=True)
    return [p.grad for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize(("queries", "seed"), [(3, 0), (128, 1)])
def test_a_tree_has_the_gradients_of_separate_rows(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, queries: int, seed: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_BLOCK_QUERIES", queries)
    policy = load_policy(model_path, trust_remote_code=False).double()
    rng = np.random.default_rng(seed)
    trees = as_trees(make_groups(seed, num_groups=1, size=6), rng)[0].trajectories
    rows = [row for tree in trees for row in apart(tree)]
    pulls = rng.normal(size=len(rows)).tolist()
    whole = gradients(policy, trees, iter(pulls))
    sums = [torch.zeros_like(grad) for grad in whole]
    for row, pull in zip(rows, pulls, strict=True):
        for total, grad in zip(sums, gradients(policy, [row], iter([pull])), strict=True):
            total += grad
    assert relative_difference(whole, sums) < 1e-6


def test_a_sample_weighs_the_same_however_many_branches_it_has() -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    p = sample.prompt_length
    plain = collate_part(whole([_group([sample, sample])]), device=CPU)
    parted = collate_part(
        whole([_group([with_branches(sample, [(p, -1), (p + 2, p)]), sample])]), device=CPU
    )
    for batch in (plain, parted):
        parts = Parts(index=batch.sequence_index, count=2, mask=batch.loss_mask)
        weights = token_weights(parts, aggregation="sequence_mean", constant_tokens=None)
        per_sample = torch.zeros(2).index_add_(0, batch.sequence_index, weights)
        assert torch.allclose(per_sample, torch.tensor([0.5, 0.5]))
    assert parted.num_sequences == 2
    assert parted.group_index.tolist() == plain.group_index.tolist()


@pytest.mark.parametrize(
    "branches", [[(99, 0)], [(2, 0), (2, 0)], [(3, 0), (2, 0)], [(-1, 0)], [(2, 2)], [(2, -9)]]
)
def test_branches_outside_the_row_are_refused(branches: list[Branch]) -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    check(sample)
    placed = [(sample.prompt_length + s, sample.prompt_length + parent) for s, parent in branches]
    with pytest.raises(ProtocolError, match="branches start"):
        check(msgspec.structs.replace(sample, branches=tuple(placed)))


def test_a_token_that_follows_nothing_is_not_trained() -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    with pytest.raises(ProtocolError, match="follows nothing"):
        check(msgspec.structs.replace(sample, branches=((sample.prompt_length, -1),)))


def check(sample: Trajectory) -> None:
    prompt = sample.token_ids[: sample.prompt_length]
    group = read_group(pack_group(_group([sample])))
    check_group(group, prompt, newest_version=0, vocabulary_size=50)


def _group(samples: list[Trajectory]) -> Group:
    return msgspec.structs.replace(make_groups(1, num_groups=1)[0], trajectories=samples)
