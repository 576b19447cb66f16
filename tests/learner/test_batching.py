from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import make_groups

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import cost_tokens, minibatches, pack, passes, share_out

CPU = torch.device("cpu")


def test_a_packed_row_by_hand() -> None:
    """One prompt (a, b), responses (c, d, e) and (f): the row is a b c d e f, and b predicts both c
    and f.
    """
    groups = make_groups(num_groups=1, size=2)
    first, second = groups[0].trajectories
    batch = collate_part(whole(groups), device=CPU)
    row = pack(batch, [0, 1], device=CPU)
    p, n, m = first.prompt_length, first.response_length, second.response_length
    assert row.input_ids[0].tolist() == [*first.token_ids.tolist(), *second.token_ids[p:].tolist()]
    assert row.position_ids[0].tolist() == [*range(p + n), *range(p, p + m)]
    assert row.predict_index.tolist() == [
        *range(p - 1, p + n - 1),
        p - 1,
        *range(p + n, p + n + m - 1),
    ]
    assert row.target_ids.tolist() == [
        *first.token_ids[p:].tolist(),
        *second.token_ids[p:].tolist(),
    ]
    assert row.last_index.tolist() == [p + n - 1, p + n + m - 1]


def test_a_row_without_ends_holds_no_token_that_predicts_nothing() -> None:
    groups = make_groups(num_groups=1, size=2)
    first, second = groups[0].trajectories
    batch = collate_part(whole(groups), device=CPU)
    row, both = pack(batch, [0, 1], device=CPU, with_ends=False), pack(batch, [0, 1], device=CPU)
    p, n = first.prompt_length, first.response_length
    assert row.input_ids[0].tolist() == [
        *first.token_ids[:-1].tolist(),
        *second.token_ids[p:-1].tolist(),
    ]
    assert row.predict_index.tolist() == [
        *range(p - 1, p + n - 1),
        p - 1,
        *range(p + n - 1, p + n + second.response_length - 2),
    ]
    assert torch.equal(row.target_ids, both.target_ids)
    assert torch.equal(row.token_index, both.token_index)
    assert row.last_index.numel() == 0


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
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_groups=st.integers(2, 8), count=st.integers(1, 4))
def test_minibatches_share_out_all_sequences(seed: int, num_groups: int, count: int) -> None:
    batch = collate_part(whole(make_groups(seed, num_groups=num_groups)), device=CPU)
    split = minibatches(batch, count=count, rng=np.random.default_rng(seed))
    assert len(split) == count
    assert all(split)
    assert sorted(s for sequences in split for s in sequences) == list(range(batch.num_sequences))


def test_minibatches_are_balanced_by_tokens_and_keep_groups_together() -> None:
    batch = collate_part(whole(make_groups(num_groups=16, size=8)), device=CPU)
    split = minibatches(batch, count=4, rng=np.random.default_rng(0))
    loads = [cost_tokens(batch, sequences) for sequences in split]
    largest = max(cost_tokens(batch, range(8 * g, 8 * g + 8)) for g in range(16))
    assert max(loads) - min(loads) <= largest
    for sequences in split:
        groups = batch.group_index[sequences]
        assert all(int((groups == g).sum()) == 8 for g in groups.unique())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_rows_and_flat_are_inverse(seed: int) -> None:
    batch = collate_part(whole(make_groups(seed)), device=CPU)
    flat = torch.arange(1, batch.num_tokens + 1)
    rows = batch.rows(flat)
    assert torch.equal(batch.flat(rows), flat)
    assert int((rows > 0).sum()) == batch.num_tokens


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
