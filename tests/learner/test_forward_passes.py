import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import make_groups, make_trainer

from async_rl.batching.batch import collate_part, whole
from async_rl.learner.forward_passes import cost_tokens, minibatches, passes, share_out

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 6),
    size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 200),
)
def test_passes_hold_each_sequence_once_within_the_budget(
    seed: int, num_groups: int, size: int, ranks: int, budget: int
) -> None:
    batch = collate_part(whole(make_groups(seed, num_groups=num_groups, size=size)), device=CPU)
    owned = share_out(batch, range(batch.num_sequences), parts=ranks, cap_tokens=budget)
    shares = passes(batch, owned, budget_tokens=budget)
    assert len({len(share) for share in shares}) == 1
    assert sorted(s for share in shares for members in share for s in members) == list(
        range(batch.num_sequences)
    )
    for members in (members for share in shares for members in share):
        assert cost_tokens(batch, members) <= budget or len(members) == 1


@pytest.mark.covers("ppo_n_minibatches")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num_groups=st.integers(8, 16), count=st.integers(1, 4))
def test_minibatches_share_out_whole_groups_and_are_balanced_by_tokens(
    seed: int, num_groups: int, count: int
) -> None:
    batch = collate_part(whole(make_groups(seed, num_groups=num_groups, size=4)), device=CPU)
    split = minibatches(batch, count=count, rng=np.random.default_rng(seed))
    assert len(split) == count
    assert sorted(s for sequences in split for s in sequences) == list(range(4 * num_groups))
    loads = [cost_tokens(batch, sequences) for sequences in split]
    largest = max(cost_tokens(batch, range(4 * g, 4 * g + 4)) for g in range(num_groups))
    assert max(loads) - min(loads) <= largest
    for sequences in split:
        groups = batch.group_index[sequences]
        assert all(int((groups == g).sum()) == 4 for g in groups.unique())


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_empty_response_is_in_a_pass_of_its_own_prompt(ranks: int) -> None:
    groups = make_groups(num_groups=5, size=2)
    for group in groups:
        first = group.trajectories[0]
        n = first.prompt_length
        group.trajectories[0] = msgspec.structs.replace(
            first,
            token_ids=first.token_ids[:n],
            loss_mask=first.loss_mask[:n],
            behavior_logprobs=first.behavior_logprobs[:n],
            versions=first.versions[:n],
        )
    batch = collate_part(whole(groups), device=CPU)
    budget = max(cost_tokens(batch, [i, i + 1]) for i in range(0, 10, 2))
    owned = share_out(batch, range(10), parts=ranks, cap_tokens=budget)
    shares = passes(batch, owned, budget_tokens=budget)
    members = [members for share in shares for members in share]
    assert sorted(s for sequences in members for s in sequences) == list(range(10))
    assert all(cost_tokens(batch, sequences) <= budget for sequences in members)
    for s in range(0, 10, 2):
        assert any({s, s + 1} <= set(sequences) for sequences in members)


def test_owners_are_balanced_in_every_minibatch_and_keep_a_prompt_together(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups(num_groups=16, size=4)
    trainer = make_trainer(model_path, "grpo_code", "learner.minibatches=2")
    heads = whole(groups).heads
    assert trainer.owners(heads, 0) == [0] * 64
    forward = trainer._forward
    monkeypatch.setattr(forward, "_ranks", dataclasses.replace(forward._ranks, world_size=2))
    owners = trainer.owners(heads, 0)
    # The few groups without an advantage are shared out separately, one sequence at a time.
    trained = [g for g, head in enumerate(heads) if not head.is_uniform]
    assert len(trained) >= 8
    assert all(len(set(owners[4 * g : 4 * g + 4])) == 1 for g in trained)
    sizes = [sample.num_tokens for head in heads for sample in head.samples]
    for minibatch in forward._minibatches(collate_part(whole(groups), device=CPU), 0, 0):
        loads = [sum(sizes[s] for s in minibatch if owners[s] == rank) for rank in (0, 1)]
        assert max(loads) < 2 * min(loads)
