"""The complete groups in memory: those that wait for the learner or are with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from async_rl.buffer import changes
from async_rl.buffer.store.store import Store
from async_rl.core.types import Group, Purpose

_log = logging.getLogger(__name__)


class KeptGroups:
    """Groups with their trajectories; those put before a restart are read from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[int, Group] = {}

    def note(self, change: changes.Change) -> None:
        """Keep the group that a change completes, and forget the groups that it closes."""
        match change:
            case changes.Completed(group=group) if group.purpose is Purpose.TRAIN:
                self._groups[group.group_id] = group
            case changes.Dropped(group_id=group_id):
                self._groups.pop(group_id, None)
            case changes.Trained(group_ids=group_ids) | changes.BatchDropped(group_ids=group_ids):
                for group_id in group_ids:
                    self._groups.pop(group_id, None)
            case changes.PromptsLeft(leavers=leavers, num_remaining=num_remaining):
                _log.info(
                    "%d prompts left the training data because of their mean reward"
                    " (data.filter), the first %s with %.3g; %d remain",
                    len(leavers),
                    leavers[0].prompt_id,
                    leavers[0].score,
                    num_remaining,
                )

    async def load(self, group_ids: Iterable[int]) -> list[Group]:
        """Return the groups with their trajectories."""
        missing = [group_id for group_id in group_ids if group_id not in self._groups]
        if missing:
            groups = await self._store.read_groups(missing)
            self._groups.update(zip(missing, groups, strict=True))
        return [self._groups[group_id] for group_id in group_ids]
