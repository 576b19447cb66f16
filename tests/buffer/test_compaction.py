"""Groups that were trained long ago become sums; what the run needs of them does not change."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from buffer_support import (
    FakePrompts,
    commit,
    evaluate,
    fail,
    forget,
    make_config,
    opened,
    problems,
    put,
    put_all,
    take,
    tickets,
)

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.audit import Audit, audit
from async_rl.buffer.store.ledger import LedgerSummary, reading, summary
from async_rl.config.run import KEPT_GROUPS
from async_rl.core.types import Purpose
from async_rl.protocol.learner import DropBatch, SetAside

CONFIG = make_config()
STEPS = 9


async def make_history(path: Path, kept_groups: int) -> tuple[int, LedgerSummary, Audit]:
    """Train nine batches of two groups; return the next group id too. In every third step a group
    fails once, and an older one is overtaken.
    """
    for version in range(STEPS):
        # Every step is another life of the buffer.
        async with opened(path, CONFIG, kept_groups=kept_groups) as service:
            name = f"generator-{version % 2}"
            for ticket in await tickets(service, version, generator=name):
                if version % 3 == 0 and ticket.attempt == 1 and ticket.group_id % 2:
                    await fail(service, ticket.group_id, 1)
                else:
                    await put(service, ticket, generator=name)
            await train(service, version)
    async with opened(path, CONFIG, kept_groups=kept_groups) as service:
        next_id = service.state.admission.next_group_id
    with reading(path) as connection:
        return next_id, summary(connection), audit(connection, CONFIG.buffer)


async def train(service: BufferService, version: int) -> None:
    """Train the next batch, make what it waits for, and compact."""
    while not (batch := await take(service, version)).groups:
        await put_all(service, version)
    await commit(service, version + 1, [group.group_id for group in batch.groups])
    await forget(service, version + 1)


async def test_the_newest_groups_keep_their_rows_and_others_stay_counted(tmp_path: Path) -> None:
    next_id, everything, complete = await make_history(tmp_path / "all", KEPT_GROUPS)
    same_id, few, compacted = await make_history(tmp_path / "few", 4)
    assert complete.problems == compacted.problems == []
    assert complete.unchecked == []
    assert everything.num_compacted == 0
    assert few.num_compacted == 2 * (STEPS - 2)
    assert compacted.num_groups == complete.num_groups - few.num_compacted
    assert f"the rows of {few.num_compacted} groups of steps 1 to 7" in compacted.unchecked[0]
    assert same_id == next_id
    for name in ("states", "dropped", "staleness", "generators", "next_position", "num_prompts"):
        assert getattr(few, name) == getattr(everything, name), name
    with sqlite3.connect(tmp_path / "few" / "store.sqlite") as connection:
        for table in ("transitions", "trained", "advantages", "blobs"):
            (left,) = connection.execute(
                f"SELECT count(*) FROM {table} WHERE group_id NOT IN (SELECT group_id FROM groups)"
            ).fetchone()
            assert left == 0, table
    connection.close()


async def test_a_lost_step_is_found(tmp_path: Path) -> None:
    await make_history(tmp_path / "few", 4)
    with sqlite3.connect(tmp_path / "few" / "store.sqlite") as connection:
        connection.execute("DELETE FROM compacted WHERE version = 3")
    connection.close()
    assert "step 3 trained 0 groups instead of 2" in problems(tmp_path / "few", CONFIG)


async def test_ids_and_positions_continue_after_compacted_ones(tmp_path: Path) -> None:
    async def train_all(first: int, last: int) -> list[int]:
        """Train all groups of the run and compact them; return the ids that were issued."""
        issued = []
        async with opened(tmp_path, kept_groups=0, num_steps=last) as service:
            for version in range(first, last):
                issued += await put_all(service, version)
                await train(service, version)
        return issued

    assert await train_all(0, 3) == list(range(6))
    assert await train_all(3, 5) == list(range(6, 10))
    with reading(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM groups").fetchone() == (0,)
        assert connection.execute("SELECT max(last_position) FROM compacted").fetchone() == (9,)
    assert problems(tmp_path, CONFIG) == []


async def test_dropped_batches_of_the_present_version_stay_counted(tmp_path: Path) -> None:
    """Its groups may be older than trained ones, which overtook them."""
    for number in (1, 2):
        async with opened(tmp_path, kept_groups=0) as service:
            if number == 1:
                slow, *others = await tickets(service, 0)
                for ticket in others:
                    await put(service, ticket)
                assert [g.group_id for g in (await take(service, 0)).groups] == [1, 2]
                await commit(service, 1, [1, 2])
                await put(service, slow)
            await put_all(service, 1)
            bad = [g.group_id for g in (await take(service, 1)).groups]
            drop = DropBatch(train_version=1, group_ids=bad, message="bad")
            assert await service.drop_batch(drop) == SetAside(num_batches=number)
            await forget(service, 1)
    assert problems(tmp_path, CONFIG) == []


async def make_evaluated_history(
    path: Path, kept_groups: int
) -> tuple[LedgerSummary, dict[int, float]]:
    """Evaluate every version and drop one group of every third step; return the scores of the
    evaluations too. The last evaluation is not reported.
    """
    prompts = FakePrompts(num_held_out=3)
    async with opened(path, None, prompts, kept_groups=kept_groups, max_attempts=1) as service:
        for version in range(STEPS):
            await evaluate(service, version)
            for ticket in await tickets(service, version):
                is_first = ticket.purpose is Purpose.TRAIN and ticket.group_id % 3 == 0
                if is_first and version % 3 == 0:
                    await fail(service, ticket.group_id, 1)
                else:
                    await put(service, ticket)
            if version < STEPS - 1:
                service.store.finish_evaluation(version, {"eval/pass_at_1": version / 10})
            await train(service, version)
        scores = await service.store.reader.evaluation_scores()
    assert problems(path, CONFIG) == []
    with reading(path) as connection:
        return summary(connection), scores


async def test_dropped_groups_and_evaluations_beside_compacted_steps_become_counts(
    tmp_path: Path,
) -> None:
    everything, scores = await make_evaluated_history(tmp_path / "all", KEPT_GROUPS)
    few, same_scores = await make_evaluated_history(tmp_path / "few", 4)
    assert everything.states["dropped"] == 2
    for name in ("states", "dropped", "evaluation_states", "next_position", "num_prompts"):
        assert getattr(few, name) == getattr(everything, name), name
    assert same_scores == scores == {version: version / 10 for version in range(STEPS - 1)}
    with sqlite3.connect(tmp_path / "few" / "store.sqlite") as connection:
        rows = connection.execute(
            "SELECT DISTINCT coalesce(evaluation, -1) FROM groups WHERE state='dropped' OR"
            " purpose='eval' ORDER BY 1"
        ).fetchall()
        [samples] = connection.execute(
            "SELECT count(*) FROM blobs WHERE group_id NOT IN (SELECT group_id FROM groups)"
        ).fetchone()
    connection.close()
    # Steps up to 7 are compacted. Their groups were admitted before the evaluation of version 6.
    assert [version for (version,) in rows] == [6, 7, 8]
    assert samples == 0


async def test_an_evaluation_that_was_not_reported_is_not_compacted(tmp_path: Path) -> None:
    path = tmp_path / "few"
    await make_evaluated_history(path, 4)
    prompts = FakePrompts(num_held_out=3)
    async with opened(path, None, prompts, kept_groups=0, max_attempts=1) as service:
        for version in range(STEPS, STEPS + 4):
            await train(service, version)
    with reading(path) as connection:
        kept = connection.execute("SELECT DISTINCT evaluation FROM groups WHERE purpose='eval'")
        assert [version for (version,) in kept] == [STEPS - 1]
    assert problems(path, CONFIG) == []


async def test_the_uses_of_compacted_groups_are_forgotten_with_them(tmp_path: Path) -> None:
    config = make_config(uses=2, max_staleness=2)
    async with opened(tmp_path, config, kept_groups=4) as service:
        for version in range(STEPS):
            await train(service, version)
    assert problems(tmp_path, config) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as connection:
        # Step 8 used the groups of step 7 again, which have no rows any more.
        for table, first in (("trained", STEPS - 1), ("reused", STEPS)):
            steps = connection.execute(
                f"SELECT DISTINCT version FROM {table} JOIN steps USING (step_id) ORDER BY version"
            ).fetchall()
            assert [version for (version,) in steps] == [*range(first, STEPS + 1)], table
            sql = (
                f"SELECT count(*) FROM {table} WHERE group_id NOT IN (SELECT group_id FROM groups)"
            )
            assert connection.execute(sql).fetchone() == (0,), table
