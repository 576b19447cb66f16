"""Facts about how the ranks of the learner read a batch."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import make_groups

from async_rl.core.codec import encode
from async_rl.core.heads import GroupHead, PackedTrajectory, pack_group, packed, read_group
from async_rl.core.types import Group, Trajectory
from async_rl.protocol.buffer import ReadSequences, Sequences
from async_rl.training import taking
from async_rl.training.operations import Fetch
from async_rl.training.taking import Parts


class Buffer:
    """Has the groups of a batch, and remembers the messages that it sent."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {g.group_id: read_group(pack_group(g)) for g in groups}
        self.sent: list[list[PackedTrajectory]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, request: ReadSequences) -> Any:
        await self.gate.wait()
        found = [self._groups[name].member(n) for name, n in request.samples]
        self.sent.append(found)
        return Sequences(trajectories=found)


def fetch_of(heads: Sequence[GroupHead], version: int = 0) -> Fetch:
    return Fetch(pool="", life=1, train_version=version, heads=list(heads))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 5),
    size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    limit=st.integers(1, 80),
    data=st.data(),
)
def test_the_parts_of_the_ranks_are_the_batch_each_sequence_once_in_bounded_messages(
    seed: int, num_groups: int, size: int, ranks: int, limit: int, data: st.DataObject
) -> None:
    groups = make_groups(seed, num_groups=num_groups, size=size)
    everything = [t for group in groups for t in group.trajectories]
    drawn = st.lists(st.integers(0, ranks - 1), min_size=len(everything), max_size=len(everything))
    owners = data.draw(drawn)

    async def story() -> None:
        buffer = Buffer(groups)
        found: dict[int, Trajectory] = {}
        for rank in range(ranks):
            mine = Parts(buffer.call, rank)
            buffer.sent.clear()
            await mine.fetch(fetch_of([packed(group).head for group in groups]), owners)
            sizes = [[len(t.unpacked().token_ids) for t in chunk] for chunk in buffer.sent]
            assert all(len(chunk) == 1 or sum(chunk) <= limit for chunk in sizes)
            assert all(sum(one) + after[0] > limit for one, after in itertools.pairwise(sizes))
            part = mine.pop(0)
            assert len(part.own) == len(part.trajectories)
            for s, trajectory in zip(part.own, part.trajectories, strict=True):
                assert s not in found
                found[s] = trajectory
        assert encode([found[s] for s in range(len(everything))]) == encode(everything)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "CHUNK_TOKENS", limit)
        asyncio.run(story())


@pytest.mark.parametrize("is_same", [False, True])
async def test_a_late_read_of_a_dropped_or_trained_batch_leaves_nothing(is_same: bool) -> None:
    """The batch that was dropped was replaced by another one; or a read was sent twice."""
    first, second = make_groups(num_groups=2, size=1)
    buffer = Buffer([first, second])
    mine = Parts(buffer.call, 0)
    buffer.gate.clear()
    earlier = second if is_same else first
    late = asyncio.create_task(mine.fetch(fetch_of([packed(earlier).head]), [0]))
    await asyncio.sleep(0)
    buffer.gate.set()
    await mine.fetch(fetch_of([packed(second).head]), [0])
    if not is_same:
        await late
    assert encode(mine.pop(0).trajectories) == encode(second.trajectories)
    await late
    with pytest.raises(KeyError):
        mine.pop(0)
