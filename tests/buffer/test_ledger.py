"""The reply of `async-rl ledger`, and the errors that its audit detects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import sys
from pathlib import Path

import msgspec
import pytest
from buffer_support import (
    Clock,
    FakePrompts,
    commit,
    fail,
    make_config,
    make_group,
    opened,
    problems,
    put,
    sync,
    take,
    tickets,
    train,
)
from tables import table

from async_rl.buffer.store.audit import audit
from async_rl.buffer.store.ledger import (
    OF_GROUP,
    OF_PROMPT,
    OF_STATE,
    OF_STEP,
    histories,
    reading,
    summary,
)
from async_rl.buffer.store.trajectories import Filter, ages, page_of, spans
from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.calls import AgentCall
from async_rl.core.checksums import sums_of, write_sums
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.core.heads import pack_group
from async_rl.core.types import DropReason, GroupState, Prompt, Purpose
from async_rl.launchers import cli
from async_rl.launchers.commands.stored import drop_group
from async_rl.protocol.buffer import FailGroup, PutGroup
from async_rl.training.checkpoints import directory_of

CONFIG = make_config(max_attempts=1)


async def make_history(path: Path) -> None:
    """Three steps, the third undone; group 4 dropped; two groups ready, two leased again."""
    async with opened(path, CONFIG) as service:
        for version in range(3):
            for ticket in await tickets(service, version):
                if ticket.group_id == 4:
                    await fail(service, 4, 1)
                else:
                    await put(service, ticket, passes=ticket.group_id != 1)
            await train(service, version)
        await sync(service, 2)
        await take(service, 2)


class ForeignPrompts(FakePrompts):
    """Texts of data sets that were read from damaged pages, with a NUL and with its escape."""

    TEXT = "a\0b \\u0000 \\\\u0000 \\\0 caf\u00e9 \U0001f600 'quoted' :name"

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        prompt = super().prompt(purpose, index)
        return msgspec.structs.replace(
            prompt, prompt_id=f"{prompt.prompt_id} {self.TEXT}", text=self.TEXT
        )


async def test_any_text_of_a_prompt_or_a_message_is_kept_to_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path, CONFIG, ForeignPrompts()) as service:
        first, second = await tickets(service, 0, credit=2)
        await put(service, first)
        await service.fail_group(
            FailGroup(
                group_id=second.group_id,
                attempt=1,
                reason=DropReason.SCORING_FAILED,
                message=ForeignPrompts.TEXT,
            )
        )
        await take(service, 0)
    assert problems(tmp_path, CONFIG) == []
    kept = ForeignPrompts.TEXT.replace("\0", "\ufffd")
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as connection:
        assert {text for (text,) in connection.execute("SELECT text FROM prompts")} == {kept}
        dropped = "SELECT message FROM groups WHERE state='dropped'"
        assert connection.execute(dropped).fetchall() == [(kept,)]
    # Open groups are compared with the data by the id of their prompt.
    async with opened(tmp_path, CONFIG, ForeignPrompts()) as service:
        await tickets(service, 0)
    async with opened(tmp_path, CONFIG, ForeignPrompts()) as service:
        assert service.state.admission.open


@pytest.fixture
def store(tmp_path: Path) -> Path:
    asyncio.run(make_history(tmp_path))
    return tmp_path / "store.sqlite"


async def test_the_calls_of_an_agent_are_rows_that_sql_finds(tmp_path: Path) -> None:
    calls = (
        AgentCall(end_tokens=0, num_tokens=9, role="judge"),
        AgentCall(end_tokens=3, num_tokens=2, role="solver", reward=0.5),
    )
    async with opened(tmp_path, CONFIG) as service:
        (ticket,) = await tickets(service, 0, credit=1)
        await put(service, ticket, calls=calls)
        await take(service, 0)
    with reading(tmp_path) as connection:
        (row,) = histories(connection, OF_GROUP, ticket.group_id)
    assert row.calls == [list(calls)] * ticket.num_samples
    query = (
        "SELECT call.value->>'role', call.value->>'reward' FROM groups, json_each(groups.calls) AS"
        " sample, json_each(sample.value) AS call WHERE group_id=?"
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as connection:
        found = connection.execute(query, [ticket.group_id]).fetchall()
    assert found == [("judge", 0.0), ("solver", 0.5)] * ticket.num_samples


def test_a_prompt_tells_its_groups_with_rewards_step_and_every_change(store: Path) -> None:
    with reading(store.parent) as connection:
        first, again = histories(connection, OF_PROMPT, "t1")
        assert histories(connection, OF_PROMPT, "nobody") == []
    seen = (first.group_id, first.state, first.step, first.rewards, first.pass_rate)
    assert seen == (1, "trained", 1, [0.0, 0.0], 0.0)
    assert (first.parts, again.parts) == ({"style": 0.5}, {"style": 1.5})
    assert [change.state for change in first.history] == [
        "generating",
        "ready",
        "leased",
        "trained",
    ]
    assert (first.generator, first.oldest_version, first.train_version) == ("generator-0", 0, 0)
    assert again.group_id == 6


def test_a_step_tells_the_groups_that_it_trained_and_an_undone_one_none(store: Path) -> None:
    with reading(store.parent) as connection:
        assert [g.group_id for g in histories(connection, OF_STEP, 1)] == [0, 1]
        assert histories(connection, OF_STEP, 3) == []
        leased = histories(connection, OF_STATE, GroupState.LEASED)
        dropped = histories(connection, OF_STATE, GroupState.DROPPED)
        assert [g.age for g in histories(connection, OF_STEP, 2)] == [1, 1]
        assert (leased[0].age, leased[-1].age, dropped[0].age) == (1, 0, None)
        assert [change.state for change in leased[0].history][-3:] == ["trained", "ready", "leased"]
        assert summary(connection).learner_version == 2


def test_the_summary_counts_states_reasons_and_ages(store: Path) -> None:
    with reading(store.parent) as connection:
        found = summary(connection)
        stored = page_of(connection, Filter(stored=True))
        assert sum(number for _, number in ages(connection)) == 4, "as many as were trained"
    assert 4 not in {row.group_id for row in stored}
    assert len(stored) == 8
    assert found.states == {
        "issued": 0,
        "generating": 0,
        "ready": 2,
        "leased": 2,
        "trained": 4,
        "dropped": 1,
    }
    assert found.dropped == {"scoring_failed": 1}
    assert (
        found.learner_version,
        found.num_undone_steps,
        found.next_position,
        found.num_prompts,
    ) == (2, 1, 9, 5)
    assert sum(found.staleness.values()) == 4
    assert found.num_stored == 8


async def test_the_times_of_a_step_count_from_the_start_of_its_first_group(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock=clock) as service:
        for _ in range(2):
            (ticket,) = await tickets(service, 0, credit=1)
            clock.now += 3
            await put(service, ticket)
            clock.now += 2
        await train(service, 0)
    with reading(tmp_path) as connection:
        found = spans(connection, 1)
    assert {
        number: [(one.state, round(one.start_s, 6), round(one.end_s, 6)) for one in group]
        for number, group in found.items()
    } == {
        0: [("generating", 0.0, 3.0), ("ready", 3.0, 10.0), ("leased", 10.0, 10.0)],
        1: [("generating", 5.0, 8.0), ("ready", 8.0, 10.0), ("leased", 10.0, 10.0)],
    }


def test_a_run_without_a_store_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match="has stored nothing yet"),
        reading(tmp_path),
    ):
        pass


@pytest.mark.parametrize("change", (WRONG := table(__file__, "wrong")))
def test_the_audit_sees_what_is_wrong(store: Path, change: str) -> None:
    assert problems(store.parent, CONFIG) == []
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as connection:
        assert connection.execute(change).rowcount > 0
    assert WRONG[change] in problems(store.parent, CONFIG)


def test_the_audit_names_the_first_twenty_groups_and_counts_the_rest(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute(
            "INSERT INTO transitions (group_id, attempt, state, at_s, generator, reason)"
            " SELECT value, 1, 'generating', 0, '', '' FROM json_each(?)",
            [json.dumps([*range(100, 125)])],
        )
    *named, rest = problems(store.parent, CONFIG)
    assert (len(named), rest) == (20, "and 5 more")


def test_the_audit_sees_an_admission_beyond_the_bound(store: Path) -> None:
    expected = (
        "group 2 was admitted while 2 were active; (max_staleness + 1) x groups_per_step is 2"
    )
    assert expected in problems(store.parent, make_config(max_staleness=0))


def ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["async-rl", "ledger", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_the_command_answers_people_and_programs_and_its_audit_decides_the_exit_code(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(store.parent)
    write_config(replace(CONFIG, run_name="mine"), store.parent / "config.yaml")
    code, out, _ = ledger(monkeypatch, capsys, run_dir, "--prompt", "t4")
    assert code == 0
    assert re.search(r"t4 +train +dropped +scoring_failed +\S+ +\d", out), out
    code, out, _ = ledger(monkeypatch, capsys, run_dir, "--step", "2", "--json")
    assert [group["step"] for group in json.loads(out)] == [2, 2]
    assert "trained 4" in ledger(monkeypatch, capsys, run_dir)[1]
    assert ledger(monkeypatch, capsys, run_dir, "--audit")[0] == 0
    assert ledger(monkeypatch, capsys, run_dir, "--state", "lost")[0] == 2
    assert "give only one of" in ledger(monkeypatch, capsys, run_dir, "--audit", "--step", "1")[2]
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("DELETE FROM blobs WHERE group_id=5")
    connection.close()
    code, out, _ = ledger(monkeypatch, capsys, run_dir, "--audit")
    assert (code, "wrong: the trajectories of group 5 are lost" in out) == (1, True)


def test_the_audit_reads_every_checkpoint(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(replace(CONFIG, run_name="mine"), store.parent / "config.yaml")
    for version in (1, 2):
        directory = directory_of(store.parent, version)
        directory.mkdir(parents=True)
        (directory / "rank_0000.safetensors").write_bytes(b"weights")
        write_sums(directory, sums_of(directory))
    code, out, _ = ledger(monkeypatch, capsys, str(store.parent), "--audit")
    assert (code, "every checkpoint has its checksums" in out) == (0, True)
    (directory_of(store.parent, 1) / "rank_0000.safetensors").write_bytes(b"weightt")
    code, out, _ = ledger(monkeypatch, capsys, str(store.parent), "--audit")
    assert (code, out.count("wrong: ")) == (1, 1)
    assert (
        "wrong: checkpoint step_000001 is damaged: rank_0000.safetensors does not have the" in out
    )


@pytest.mark.parametrize("state", ["ready", "leased", "issued"])
async def test_a_person_can_drop_a_group_of_a_stopped_run_that_has_not_been_trained(
    tmp_path: Path, state: str
) -> None:
    async with opened(tmp_path) as service:
        given = await tickets(service, 0)
        for ticket in given[: 3 if state == "issued" else 4]:
            await put(service, ticket)
        if state == "leased":
            await take(service, 0)
        group_id = given[3 if state == "issued" else 1].group_id
        with pytest.raises(Unavailable, match="is written by another process"):
            await drop_group(tmp_path, group_id)
    await drop_group(tmp_path, group_id)
    for again in (group_id, 99):
        with pytest.raises(ConfigError, match=rf"--drop {again}: the group is .*before it is"):
            await drop_group(tmp_path, again)
    async with opened(tmp_path) as service:
        await sync(service, 0, "a")
        with reading(tmp_path) as connection:
            assert summary(connection).dropped == {"untrainable": 1}
        for ticket in await tickets(service, 0, generator="generator-1"):
            group = make_group(ticket, generator="generator-1")
            await service.put_group(PutGroup(payload=pack_group(group)))
        batch = [group.group_id for group in (await take(service, 0)).groups]
        assert group_id not in batch
        await commit(service, 1, batch)
    with reading(tmp_path) as connection:
        assert audit(connection, make_config().buffer).problems == []
