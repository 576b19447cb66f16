"""Old groups: several steps use them (buffer.uses_per_group), and those that were trained long ago
become sums; what the run needs of them does not change.
"""

from pathlib import Path

from buffer_support import (
    commit,
    evaluate,
    fail,
    forget,
    make_config,
    opened,
    problems,
    put,
    put_all,
    rows,
    step,
    take,
    tickets,
)

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import LedgerSummary, audit, reading, summary
from async_rl.buffer.store.trajectories import batch_of, batch_rows
from async_rl.config.run import KEPT_GROUPS
from async_rl.core.types import Purpose

CONFIG = make_config()
STEPS = 9


async def train(service: BufferService, version: int) -> None:
    """Train the next batch, make what it waits for, and compact."""
    while not (batch := await take(service, version)).groups:
        await put_all(service, version)
    await commit(service, version + 1, [group.group_id for group in batch.groups])
    await forget(service, version + 1)


async def test_ids_and_positions_continue_after_compacted_ones(tmp_path: Path) -> None:
    for first, last in ((0, 3), (3, 5)):
        issued = []
        async with opened(tmp_path, kept_groups=0, num_steps=last) as service:
            for version in range(first, last):
                issued += await put_all(service, version)
                await train(service, version)
        assert issued == [*range(2 * first, 2 * last)]
    assert rows(tmp_path, "SELECT count(*) FROM groups") == [(0,)]
    assert rows(tmp_path, "SELECT max(last_position) FROM compacted") == [(9,)]
    assert problems(tmp_path, CONFIG) == []


async def make_history(path: Path, kept_groups: int) -> tuple[LedgerSummary, dict[int, float]]:
    """Train nine batches of two groups, evaluate every version, and drop one group of every third
    step; return the scores of the evaluations too. The last evaluation is not reported.
    """
    async with opened(path, kept_groups=kept_groups, max_attempts=1) as service:
        for version in range(STEPS):
            await evaluate(service, version)
            name = f"generator-{version % 2}"
            for ticket in await tickets(service, version, generator=name):
                is_first = ticket.purpose is Purpose.TRAIN and ticket.group_id % 3 == 0
                if is_first and version % 3 == 0:
                    await fail(service, ticket.group_id, 1)
                else:
                    await put(service, ticket, generator=name)
            if version < STEPS - 1:
                service.store.finish_evaluation(version, {"eval/pass_at_1": version / 10})
            await train(service, version)
        scores = await service.store.reader.evaluation_scores()
    assert problems(path, CONFIG) == []
    with reading(path) as connection:
        return summary(connection), scores


async def test_old_groups_become_counts_and_the_newest_keep_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "few"
    everything, scores = await make_history(tmp_path / "all", KEPT_GROUPS)
    few, same_scores = await make_history(path, 4)
    assert everything.states["dropped"] == 2
    assert everything.num_compacted == 0 < few.num_compacted
    counted = ("states", "dropped", "evaluation_states", "staleness", "generators")
    for name in (*counted, "next_position", "num_prompts"):
        assert getattr(few, name) == getattr(everything, name), name
    assert same_scores == scores == {version: version / 10 for version in range(STEPS - 1)}
    ended = "SELECT DISTINCT coalesce(evaluation, -1) FROM groups WHERE state='dropped' OR"
    # Steps up to 7 are compacted. Their groups were admitted before the evaluation of version 6.
    assert rows(path, f"{ended} purpose='eval' ORDER BY 1") == [(6,), (7,), (8,)]
    for table in ("transitions", "trained", "blobs"):
        lost = f"SELECT * FROM {table} WHERE group_id NOT IN (SELECT group_id FROM groups)"
        assert rows(path, lost) == [], table
    with reading(path) as connection:
        assert "groups of steps 1 to 7" in audit(connection, CONFIG.buffer).unchecked[0]
    async with opened(path, kept_groups=0, max_attempts=1) as service:
        for version in range(STEPS, STEPS + 4):
            await train(service, version)
    kept = "SELECT DISTINCT evaluation FROM groups WHERE purpose='eval'"
    assert rows(path, kept) == [(STEPS - 1,)], "it was not reported"
    assert problems(path, CONFIG) == []
    rows(path, "DELETE FROM compacted WHERE version = 3")
    assert "step 3 trained 0 groups instead of 2" in problems(path, CONFIG)


async def test_the_audit_finds_a_group_that_was_used_again_too_late(tmp_path: Path) -> None:
    config = make_config(uses=3, max_staleness=3)
    async with opened(tmp_path, config) as service:
        for version in range(3):
            await step(service, version)
    assert problems(tmp_path, config) == []
    with reading(tmp_path) as store:
        assert [row.group_id for row in batch_rows(store, 3)] == [0, 1, 2, 3, 4, 5]
        assert [group.group_id for group in batch_of(store, 3) or ()] == [0, 1, 2, 3, 4, 5]
    rows(tmp_path, "INSERT INTO reused SELECT 0, step_id FROM steps WHERE version=1")
    rows(tmp_path, "UPDATE groups SET oldest_version=-9 WHERE group_id=1")
    again = "again, which is too old or was not trained before"
    found = [each for each in problems(tmp_path, config) if again in each]
    assert found == [f"step {n} trained group {i} {again}" for n, i in ((1, 0), (2, 1), (3, 1))]
