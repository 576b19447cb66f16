"""A sample of several segments in a packed row: each is computed as if it were a row of its own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import make_groups

from async_rl.algorithms.losses import token_weights
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import collate
from async_rl.batching.packing import Pass, pack
from async_rl.buffer.checks import check_group
from async_rl.core.codec import decode
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup, pack_group
from async_rl.core.types import Group, Trajectory

CPU = torch.device("cpu")


def with_starts(sample: Trajectory, starts: list[int]) -> Trajectory:
    """The sample with segments that begin at these positions of its response."""
    places = [sample.prompt_length + start for start in starts]
    mask = sample.loss_mask.copy()
    mask[places] = False
    versions = np.where(mask, sample.versions, -1).astype(np.int32)
    return msgspec.structs.replace(sample, starts=tuple(places), loss_mask=mask, versions=versions)


def cut_up(groups: list[Group], rng: np.random.Generator) -> list[Group]:
    def random_starts(sample: Trajectory) -> Trajectory:
        size = sample.response_length
        count = int(rng.integers(0, min(3, size) + 1))
        return with_starts(sample, sorted(rng.choice(size, count, replace=False).tolist()))

    return [
        msgspec.structs.replace(g, trajectories=[random_starts(t) for t in g.trajectories])
        for g in groups
    ]


def seen_by_each(row: Pass) -> dict[int, list[int]]:
    """The places of the row that each place attends to."""
    seen: dict[int, list[int]] = {}
    for start, length, prefix_start, prefix in row.segments.tolist():
        for at in range(start, start + length):
            assert at not in seen
            seen[at] = [*range(prefix_start, prefix_start + prefix), *range(start, at + 1)]
    return seen


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 3),
    size=st.integers(1, 4),
    with_ends=st.booleans(),
)
def test_a_segment_sees_itself_only(seed: int, num_groups: int, size: int, with_ends: bool) -> None:
    groups = make_groups(seed, num_groups=num_groups, size=size)
    groups = cut_up(groups, np.random.default_rng(seed))
    batch = collate(groups, device=CPU)
    row = pack(batch, range(batch.num_sequences), device=CPU, with_ends=with_ends)
    seen = seen_by_each(row)
    assert sorted(seen) == list(range(row.input_ids.numel()))
    ids, positions = row.input_ids[0], row.position_ids[0]
    number = 0
    for sample in (t for g in groups for t in g.trajectories):
        p = sample.prompt_length
        for t in range(p, len(sample.token_ids)):
            at = seen[int(row.predict_index[number])]
            if sample.loss_mask[t]:
                begin = max((s for s in sample.starts if s <= t), default=0)
                assert ids[at].tolist() == sample.token_ids[begin:t].tolist()
                assert positions[at].tolist() == list(range(t - begin))
            assert row.target_ids[number] == sample.token_ids[t]
            number += 1


def test_a_sample_weighs_the_same_however_many_segments_it_has() -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    plain = collate([_group([sample, sample])], device=CPU)
    parted = collate([_group([with_starts(sample, [0, 2]), sample])], device=CPU)
    for batch in (plain, parted):
        parts = Parts(index=batch.sequence_index, count=2, mask=batch.loss_mask)
        weights = token_weights(parts, aggregation="sequence_mean", constant_tokens=None)
        per_sample = torch.zeros(2).index_add_(0, batch.sequence_index, weights)
        assert torch.allclose(per_sample, torch.tensor([0.5, 0.5]))
    assert parted.num_sequences == 2
    assert parted.group_index.tolist() == plain.group_index.tolist()


@pytest.mark.parametrize("starts", [(99,), (2, 2), (3, 2), (0,)])
def test_starts_outside_the_response_are_refused(starts: tuple[int, ...]) -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    assert sample.prompt_length > 1
    check(sample)
    with pytest.raises(ProtocolError, match="segments start"):
        check(msgspec.structs.replace(sample, starts=starts))


def test_the_first_token_of_a_segment_is_not_trained() -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    with pytest.raises(ProtocolError, match="nothing predicts it"):
        check(msgspec.structs.replace(sample, starts=(sample.prompt_length,)))


def check(sample: Trajectory) -> None:
    prompt = sample.token_ids[: sample.prompt_length]
    group = decode(pack_group(_group([sample])), PackedGroup)
    check_group(group, prompt, newest_version=0, vocabulary_size=50)


def _group(samples: list[Trajectory]) -> Group:
    return msgspec.structs.replace(make_groups(1, num_groups=1)[0], trajectories=samples)
