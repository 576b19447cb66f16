"""The groups as the buffer's memory knows them: numbers only, the trajectories are in the store.

An open group is admitted and not finished. A stored group is complete; a step trains a batch of
them, and may use those of earlier batches again.
"""

from collections.abc import Iterable, Mapping, Sequence

from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION, GroupState, Purpose


@frozen
class OpenGroup:
    """One admitted, unfinished group: issued or generating.

    index: position of its prompt in the order of its purpose.  attempt: 0 before the first
    hand-out.  version: no token of this attempt is older; of an issued group the version of its
    last attempt.  evaluation: the version that an evaluation group evaluates.  num_spared: attempts
    that do not count, because their generator left on request.  issued_s: monotonic seconds of the
    last hand-out.
    """

    group_id: int
    purpose: Purpose
    index: int
    state: GroupState = GroupState.ISSUED
    attempt: int = 0
    generator: str = ""
    incarnation: str = ""
    # A lower bound: the generator may load newer weights before the first token.
    version: int = NO_VERSION
    evaluation: int = NO_VERSION
    # Apart from `attempt`, whose number must grow with every hand-out.
    num_spared: int = 0
    issued_s: float = 0.0


@frozen
class StoredGroup:
    """One finished training group.

    oldest_version and newest_version: of its trained tokens.  planned: the train_version that it
    was leased for once, or NO_VERSION.  issued_s, ready_s: monotonic seconds of its last hand-out
    and of its arrival, 0 if an earlier process of the buffer put it.
    """

    group_id: int
    oldest_version: int
    newest_version: int
    # Kept when the lease is returned: a repeated step trains the same groups.
    planned: int = NO_VERSION
    issued_s: float = 0.0
    ready_s: float = 0.0


@frozen
class Take:
    """The result of one attempt to take a batch.

    group_ids: the batch, empty if there is none yet; waits_for then says why.  reused: groups of
    earlier batches that are trained with it.  dropped: over-age groups, removed in either case.
    """

    group_ids: tuple[int, ...] = ()
    reused: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    waits_for: str = ""


@frozen
class Recovered:
    """The state that a store contains when a buffer starts.

    newest_version: of the steps of all histories.  lives: incarnation, number and first version of
    each life of the learner.  set_aside: groups of dropped batches, per train_version.
    prompt_ids: of the open groups.  trained: groups of the newest steps, for buffer.uses_per_group.
    evaluations: whether each was reported.  left: (position, prompt indices) of prompts that left
    the data.  chosen: (position, row) of selected prompts.  rewards: (position, reward of each
    sample) of the training groups that were put, read from the file when they are iterated.
    """

    learner_version: int
    newest_version: int
    lives: Sequence[tuple[str, int, int]]
    set_aside: Mapping[int, int]
    next_group_id: int
    next_index: int
    open: Sequence[OpenGroup]
    prompt_ids: Mapping[int, str]
    ready: Sequence[StoredGroup]
    leased: Sequence[StoredGroup]
    trained: Sequence[StoredGroup]
    evaluations: Mapping[int, bool]
    left: Sequence[tuple[int, Sequence[int]]]
    chosen: Sequence[tuple[int, int]]
    rewards: Iterable[tuple[int, Sequence[float]]]


Batches = dict[int, tuple[StoredGroup, ...]]
"""The groups of each batch by its train_version."""


def batches_of(groups: Iterable[StoredGroup]) -> Batches:
    """Return the batches of planned groups."""
    batches: Batches = {}
    for group in sorted(groups, key=lambda group: (group.planned, group.group_id)):
        batches[group.planned] = (*batches.get(group.planned, ()), group)
    return batches
