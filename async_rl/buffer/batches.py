"""The batches of steps: their order, and the groups of earlier ones that a step uses again."""

from collections.abc import Callable, Iterable

from async_rl.buffer.groups import StoredGroup
from async_rl.core.types import NO_VERSION

Batches = dict[int, tuple[StoredGroup, ...]]
"""The groups of each batch by its train_version."""


def in_order(group: StoredGroup) -> tuple[bool, int, int]:
    """Return the place of a group in the order in which groups are trained."""
    # Planned groups come first, in their former batches: a step that is repeated after a crash then
    # trains the same groups, and its weights are the same as before.
    return group.planned == NO_VERSION, group.planned, group.group_id


def ids_of(groups: Iterable[StoredGroup]) -> tuple[int, ...]:
    """Return the numbers of groups."""
    return tuple(group.group_id for group in groups)


def batches_of(groups: Iterable[StoredGroup]) -> Batches:
    """Return the batches of planned groups."""
    batches: Batches = {}
    for group in sorted(groups, key=in_order):
        batches[group.planned] = (*batches.get(group.planned, ()), group)
    return batches


class Reuse:
    """The batches that were trained last, whose groups the next steps use again.

    uses: buffer.uses_per_group. trained: the groups of the newest uses - 1 steps, planned for the
    version that they were trained on. is_over_age: whether a batch of this version may not have a
    group.
    """

    def __init__(
        self,
        uses: int,
        trained: Iterable[StoredGroup],
        is_over_age: Callable[[StoredGroup, int], bool],
    ) -> None:
        self._uses = uses
        self._is_over_age = is_over_age
        self._trained = batches_of(trained)

    def restart(self, trained: Iterable[StoredGroup]) -> None:
        """The learner starts again after these groups."""
        self._trained = batches_of(trained)

    def end(self, train_version: int, batch: tuple[StoredGroup, ...]) -> None:
        """The batch of this version is trained."""
        self._trained[train_version] = batch
        self._trained.pop(train_version - self._uses + 1, None)

    def of(self, train_version: int, leases: Batches) -> tuple[int, ...]:
        """Return the groups that are trained with the batch of this version once more."""
        batches = self._trained | leases
        earlier = range(train_version - self._uses + 1, train_version)
        groups = [group for version in earlier for group in batches.get(version, ())]
        return ids_of(group for group in groups if not self._is_over_age(group, train_version))
