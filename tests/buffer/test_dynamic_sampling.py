"""Groups whose samples all have the same reward are replaced where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from buffer_support import ask, commit, make_config, make_group, opened, states, take

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.audit import audit
from async_rl.buffer.store.ledger import reading
from async_rl.core.heads import pack_group
from async_rl.core.types import Group
from async_rl.protocol.buffer import PutGroup


def mixed(group: Group) -> Group:
    """The group with another reward for its first sample."""
    first, *others = group.trajectories
    score = msgspec.structs.replace(first.score, reward=first.score.reward + 1)
    return msgspec.structs.replace(
        group, trajectories=[msgspec.structs.replace(first, score=score), *others]
    )


async def work(service: BufferService, *, num_mixed: int) -> int:
    """Finish every ticket that the buffer hands out, that many with a signal; return how many."""
    reply: Any = await service.request_work(ask(0, credit=8))
    for number, ticket in enumerate(reply.tickets):
        group = make_group(ticket, versions=[0, 0, 0])
        await service.put_group(
            PutGroup(payload=pack_group(mixed(group) if number < num_mixed else group))
        )
    return len(reply.tickets)


@pytest.mark.proves("buffer.uniform_groups")
@pytest.mark.parametrize(("choice", "is_replaced"), [("train", False), ("replace", True)])
async def test_a_group_without_a_signal_is_replaced_and_counted(
    tmp_path: Path, choice: str, is_replaced: bool
) -> None:
    config = make_config(groups_per_step=2, max_staleness=0, uniform_groups=choice)

    async with opened(tmp_path, config) as service:
        assert await work(service, num_mixed=1) == 2
        assert service.state.drops["no_signal"] == int(is_replaced)
        # The freed place is admitted again, at the same version and for the same batch.
        assert await work(service, num_mixed=1) == int(is_replaced)
        taken = await take(service, 0)
        group_ids = [group.group_id for group in taken.groups]
        assert group_ids == ([0, 2] if is_replaced else [0, 1])
        await commit(service, 1, group_ids)
    with reading(tmp_path) as connection:
        assert audit(connection, config.buffer).problems == []
    dropped = [i for i, state in states(tmp_path).items() if state == "dropped"]
    assert dropped == ([1] if is_replaced else [])
