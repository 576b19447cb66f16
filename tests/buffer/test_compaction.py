"""Groups that were trained long ago become sums; what the run needs of them does not change."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from buffer_support import (
    FakePrompts,
    fail,
    make_config,
    make_group,
    opened,
    put_all,
    run,
    take,
    tickets,
)

from async_rl.buffer.store.audit import Audit, audit
from async_rl.buffer.store.ledger import LedgerSummary, reading, summary
from async_rl.config.run import KEPT_GROUPS
from async_rl.core.types import Purpose
from async_rl.launchers.commands.ledger import promise_of
from async_rl.protocol.buffer import PutGroup
from async_rl.protocol.learner import CommitStep, ForgetBefore, StartEvaluation

STEPS = 9


def make_history(path: Path, kept_groups: int) -> tuple[int, LedgerSummary, Audit]:
    """Train nine batches of two groups; return the next group id too. In every third step a group
    fails once, and an older one is overtaken.
    """
    config = make_config(groups_per_step=2, max_staleness=1)
    path.mkdir()

    async def story() -> None:
        for version in range(STEPS):
            # Every step is another life of the buffer.
            async with opened(path, config, kept_groups=kept_groups) as service:
                for ticket in await tickets(service, version, generator=f"generator-{version % 2}"):
                    if version % 3 == 0 and ticket.attempt == 1 and ticket.group_id % 2:
                        await fail(service, ticket.group_id, 1)
                        continue
                    await service.put_group(
                        PutGroup(group=make_group(ticket, generator=f"generator-{version % 2}"))
                    )
                batch = await take(service, version)
                while not batch.groups:
                    for ticket in await tickets(service, version, generator="generator-9"):
                        group = make_group(ticket, generator="generator-9")
                        await service.put_group(PutGroup(group=group))
                    batch = await take(service, version)
                ids = [group.group_id for group in batch.groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
                await service.forget_before(ForgetBefore(version=version + 1))

    run(story())

    async def next_id() -> None:
        async with opened(path, config, kept_groups=kept_groups) as service:
            found.append(service.state.admission.next_group_id)

    found: list[int] = []
    run(next_id())
    with reading(path / "store.sqlite") as connection:
        return found[0], summary(connection), audit(connection, promise_of(config))


def test_the_newest_groups_keep_their_rows_and_all_others_stay_counted(tmp_path: Path) -> None:
    next_id, everything, complete = make_history(tmp_path / "all", KEPT_GROUPS)
    same_id, few, compacted = make_history(tmp_path / "few", 4)
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


def test_a_lost_step_is_found(tmp_path: Path) -> None:
    make_history(tmp_path / "few", 4)
    path = tmp_path / "few" / "store.sqlite"
    promise = promise_of(make_config(groups_per_step=2, max_staleness=1))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM compacted WHERE version = 3")
    connection.close()
    with reading(path) as opened_store:
        assert "step 3 trained 0 groups instead of 2" in audit(opened_store, promise).problems


def test_ids_and_positions_continue_after_those_that_have_no_rows_any_more(
    tmp_path: Path,
) -> None:
    async def train(first: int, last: int) -> list[int]:
        """Train all groups of the run and compact all of them; return the ids that were issued."""
        config = make_config(num_steps=last)
        issued = []
        async with opened(tmp_path, config, kept_groups=0) as service:
            for version in range(first, last):
                issued += await put_all(service, version)
                batch = await take(service, version)
                ids = [group.group_id for group in batch.groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
            await service.forget_before(ForgetBefore(version=last))
        return issued

    async def story() -> None:
        assert await train(0, 3) == list(range(6))
        assert await train(3, 5) == list(range(6, 10))

    run(story())
    with reading(tmp_path / "store.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM groups").fetchone() == (0,)
        assert connection.execute("SELECT max(last_position) FROM compacted").fetchone() == (9,)
        assert audit(connection, promise_of(make_config())).problems == []


def make_evaluated_history(
    path: Path, kept_groups: int
) -> tuple[LedgerSummary, Audit, dict[int, float]]:
    """Evaluate every version and drop one group of every third step; return the scores of the
    evaluations too. The last evaluation is not reported.
    """
    config = make_config(groups_per_step=2, max_attempts=1)
    path.mkdir()
    scores: dict[int, float] = {}

    async def story() -> None:
        async with opened(
            path, config, FakePrompts(num_held_out=3), kept_groups=kept_groups
        ) as service:
            for version in range(STEPS):
                await service.start_evaluation(StartEvaluation(version=version))
                given = await tickets(service, version)
                for ticket in given:
                    is_first = ticket.purpose is Purpose.TRAIN and ticket.group_id % 3 == 0
                    if is_first and version % 3 == 0:
                        await fail(service, ticket.group_id, 1)
                        continue
                    await service.put_group(PutGroup(group=make_group(ticket)))
                batch = await take(service, version)
                while not batch.groups:
                    await put_all(service, version)
                    batch = await take(service, version)
                ids = [group.group_id for group in batch.groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
                if version < STEPS - 1:
                    figures = {"eval/pass_at_1": version / 10}
                    service._store.finish_evaluation(version, figures)
                await service.forget_before(ForgetBefore(version=version + 1))
            scores.update(await service._store.reader.evaluation_scores())

    run(story())
    with reading(path / "store.sqlite") as connection:
        return summary(connection), audit(connection, promise_of(config)), scores


def test_dropped_groups_and_evaluations_beside_compacted_steps_become_counts(
    tmp_path: Path,
) -> None:
    everything, complete, scores = make_evaluated_history(tmp_path / "all", KEPT_GROUPS)
    few, compacted, same_scores = make_evaluated_history(tmp_path / "few", 4)
    assert complete.problems == compacted.problems == []
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


def test_an_evaluation_that_was_not_reported_is_not_compacted(tmp_path: Path) -> None:
    make_evaluated_history(tmp_path / "few", 4)
    path = tmp_path / "few" / "store.sqlite"
    config = make_config(groups_per_step=2, max_attempts=1)

    async def story() -> None:
        async with opened(
            tmp_path / "few", config, FakePrompts(num_held_out=3), kept_groups=0
        ) as service:
            for version in range(STEPS, STEPS + 4):
                batch = await take(service, version)
                while not batch.groups:
                    await put_all(service, version)
                    batch = await take(service, version)
                ids = [group.group_id for group in batch.groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
                await service.forget_before(ForgetBefore(version=version + 1))

    run(story())
    with reading(path) as connection:
        kept = connection.execute("SELECT DISTINCT evaluation FROM groups WHERE purpose='eval'")
        assert [version for (version,) in kept] == [STEPS - 1]
        assert audit(connection, promise_of(config)).problems == []
