"""A sample that is a tree, in a packed row: what each token sees, and which trees are refused. The
oracle of whole steps computes such samples one path at a time.
"""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import as_trees, make_groups, paths_of
from test_attention import seen_by

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.buffer.tickets import check_group
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Branch, Group, Trajectory

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


@pytest.mark.parametrize(
    ("branches", "reason"),
    [
        ([(3, 0), (2, 0)], "branches start"),
        ([(2, 2)], "branches start"),
        # Its token is trained.
        ([(0, -99)], "follows nothing"),
    ],
)
def test_branches_outside_the_row_and_trained_tokens_that_follow_nothing_are_refused(
    branches: list[Branch], reason: str
) -> None:
    sample = make_groups(1, num_groups=1, size=1)[0].trajectories[0]
    check(sample)
    p = sample.prompt_length
    placed = tuple((p + start, max(-1, p + parent)) for start, parent in branches)
    with pytest.raises(ProtocolError, match=reason):
        check(msgspec.structs.replace(sample, branches=placed))


def check(sample: Trajectory) -> None:
    prompt = sample.token_ids[: sample.prompt_length]
    group = read_group(pack_group(_group([sample])))
    check_group(group, prompt, newest_version=0, vocabulary_size=50)


def _group(samples: list[Trajectory]) -> Group:
    return msgspec.structs.replace(make_groups(1, num_groups=1)[0], trajectories=samples)
