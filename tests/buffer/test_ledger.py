"""The reply of `async-rl ledger`, and the errors that its audit detects."""

import asyncio
import functools
import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from buffer_support import (
    FakePrompts,
    fail,
    make_config,
    opened,
    problems,
    put,
    rows,
    sync,
    take,
    tickets,
    train,
)
from command_line import Command
from tables import table

from async_rl.buffer.store.ledger import (
    OF_GROUP,
    OF_PROMPT,
    OF_STATE,
    OF_STEP,
    histories,
    reading,
    summary,
)
from async_rl.buffer.store.trajectories import Filter, ages, page_of
from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.calls import AgentCall
from async_rl.core.checksums import sums_of, write_sums
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.core.types import GroupState, Prompt, Purpose
from async_rl.launchers.commands.stored import drop_group
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
    text = ForeignPrompts.TEXT
    async with opened(tmp_path, CONFIG, ForeignPrompts()) as service:
        first, _ = await tickets(service, 0, credit=2)
        await put(service, first)
        await fail(service, 1, 1, message=text)
        await tickets(service, 0)
    assert problems(tmp_path, CONFIG) == []
    kept = text.replace("\0", "\ufffd")
    assert set(rows(tmp_path, "SELECT text FROM prompts")) == {(kept,)}
    assert rows(tmp_path, "SELECT message FROM groups WHERE state='dropped'") == [(kept,)]
    # Open groups are compared with the data by the id of their prompt.
    async with opened(tmp_path, CONFIG, ForeignPrompts()) as service:
        assert service.state.admission.open


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    asyncio.run(make_history(path))
    write_config(replace(CONFIG, run_name="mine"), path / "config.yaml")
    return path


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose store may be changed."""
    return Path(shutil.copytree(made, tmp_path / "run"))


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
    found = rows(tmp_path, query, ticket.group_id)
    assert found == [("judge", 0.0), ("solver", 0.5)] * ticket.num_samples


def test_groups_are_told_by_prompt_step_and_state_with_every_change(made: Path) -> None:
    with reading(made) as connection:
        first, again = histories(connection, OF_PROMPT, "t1")
        assert histories(connection, OF_PROMPT, "nobody") == []
        assert [g.group_id for g in histories(connection, OF_STEP, 1)] == [0, 1]
        assert histories(connection, OF_STEP, 3) == [], "it is undone"
        leased = histories(connection, OF_STATE, GroupState.LEASED)
        dropped = histories(connection, OF_STATE, GroupState.DROPPED)
        assert [g.age for g in histories(connection, OF_STEP, 2)] == [1, 1]
    seen = (first.group_id, first.state, first.step, first.rewards, first.pass_rate)
    assert seen == (1, "trained", 1, [0.0, 0.0], 0.0)
    assert (first.generator, first.oldest_version, first.train_version) == ("generator-0", 0, 0)
    assert (again.group_id, first.parts, again.parts) == (6, {"style": 0.5}, {"style": 1.5})
    assert [c.state for c in first.history] == ["generating", "ready", "leased", "trained"]
    assert (leased[0].age, leased[-1].age, dropped[0].age) == (1, 0, None)
    assert [c.state for c in leased[0].history][-3:] == ["trained", "ready", "leased"]


def test_the_summary_counts_states_reasons_and_ages(made: Path) -> None:
    with reading(made) as connection:
        found = summary(connection)
        stored = page_of(connection, Filter(stored=True))
        assert sum(number for _, number in ages(connection)) == 4, "as many as were trained"
    assert 4 not in {row.group_id for row in stored}
    assert len(stored) == found.num_stored == 8
    states = {"issued": 0, "generating": 0, "ready": 2, "leased": 2, "trained": 4, "dropped": 1}
    assert (found.states, found.dropped) == (states, {"scoring_failed": 1})
    assert (found.learner_version, found.num_undone_steps) == (2, 1)
    assert (found.next_position, found.num_prompts) == (9, 5)
    assert sum(found.staleness.values()) == 4


@pytest.mark.parametrize("change", (WRONG := table(__file__, "wrong")))
def test_the_audit_sees_what_is_wrong(run_dir: Path, change: str) -> None:
    rows(run_dir, change)
    assert WRONG[change] in problems(run_dir, CONFIG)


def test_the_audit_sees_an_admission_beyond_the_bound(made: Path) -> None:
    expected = (
        "group 2 was admitted while 2 were active; (max_staleness + 1) x groups_per_step is 2"
    )
    assert expected in problems(made, make_config(max_staleness=0))


def test_the_audit_decides_the_exit_code_of_the_command(run_dir: Path, command: Command) -> None:
    run = functools.partial(command, "ledger", run_dir)
    code, out, _ = run("--prompt", "t4")
    assert code == 0
    assert re.search(r"t4 +train +dropped +scoring_failed +\S+ +\d", out), out
    assert [group["step"] for group in json.loads(run("--step", "2", "--json").out)] == [2, 2]
    assert "trained 4" in run().out
    assert run("--state", "lost").code == 2
    assert "give only one of" in run("--audit", "--step", "1").err
    for version in (1, 2):
        directory = directory_of(run_dir, version)
        directory.mkdir(parents=True)
        (directory / "rank_0000.safetensors").write_bytes(b"weights")
        write_sums(directory, sums_of(directory))
    code, out, _ = run("--audit")
    assert (code, "every checkpoint has its checksums" in out) == (0, True)
    (directory_of(run_dir, 1) / "rank_0000.safetensors").write_bytes(b"weightt")
    damaged = "wrong: checkpoint step_000001 is damaged: rank_0000.safetensors does not have the"
    code, out, _ = run("--audit")
    assert (code, out.count("wrong: "), damaged in out) == (1, 1, True)
    rows(run_dir, "DELETE FROM blobs WHERE group_id=5")
    code, out, _ = run("--audit")
    assert (code, "wrong: the trajectories of group 5 are lost" in out) == (1, True)


@pytest.mark.parametrize("state", ["ready", "leased", "issued"])
async def test_a_person_can_drop_a_group_of_a_stopped_run(tmp_path: Path, state: str) -> None:
    async with opened(tmp_path) as service:
        *given, last = await tickets(service, 0)
        for ticket in given:
            await put(service, ticket)
        if state == "leased":
            await take(service, 0)
        group_id = last.group_id if state == "issued" else 1
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
            await put(service, ticket, generator="generator-1")
        assert group_id not in await train(service, 0)
    assert problems(tmp_path, make_config()) == []
