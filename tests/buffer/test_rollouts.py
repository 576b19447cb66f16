"""What a run's store keeps of its trajectories, and what `async-rl rollouts` shows of them."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from buffer_support import forget, make_config, opened, put, step, tickets, train
from command_line import Command
from tokenizers import Tokenizer, models

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import Rollout, complete_steps, rollouts
from async_rl.composition.compose import write_config
from async_rl.core.types import Group
from async_rl.launchers.commands.stored import choose
from async_rl.runs.samples import Sample, samples
from async_rl.runtime.context import Control

WORDS = [f"w{i} " for i in range(5)]


async def make_history(path: Path) -> None:
    """Two steps of two groups of two; the samples of group 1 failed; two groups more are ready."""
    async with opened(path) as service:
        for version in range(2):
            versions = [max(version - 1, 0), version, version]
            for ticket in await tickets(service, version):
                await put(service, ticket, passes=ticket.group_id != 1, versions=versions)
            await train(service, version)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    asyncio.run(make_history(run_dir))
    write_config(make_config(), run_dir / "config.yaml")
    core = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    core.save(str(run_dir / "tokenizer.json"))
    (run_dir / "control.json").write_bytes(
        msgspec.json.encode(Control(address="", pid=1, machine="", model_path=str(run_dir)))
    )
    return run_dir


def stored(run_dir: Path, step: int | None = None, most: int = 99) -> list[Rollout]:
    with reading(run_dir) as connection:
        return rollouts(connection, step=step, most=most)


def with_rewards(group: Group, *rewards: float) -> Group:
    samples = [
        msgspec.structs.replace(sample, score=msgspec.structs.replace(sample.score, reward=reward))
        for sample, reward in zip(group.trajectories, rewards, strict=True)
    ]
    return msgspec.structs.replace(group, trajectories=samples)


def test_stored_groups_are_read_by_step_and_the_newest_first_trained_or_not(run_dir: Path) -> None:
    found = stored(run_dir, step=1)
    assert [(r.step, r.prompt) for r in found] == [
        (1, f"text of {r.group.prompt_id}") for r in found
    ]
    assert (len(found), stored(run_dir, step=7)) == (2, [])
    ids = [r.group.group_id for r in stored(run_dir)]
    assert ids == sorted(ids, reverse=True)
    assert {r.step for r in stored(run_dir)} == {None, 1, 2}
    assert [r.group.group_id for r in stored(run_dir, most=1)] == ids[:1]
    failed = samples(run_dir, step=None, failed=True, most=99)
    assert {sample.rollout.group.group_id for sample in failed} == {1}
    assert "w3" in failed[0].response


def test_one_sample_of_each_group_is_chosen_by_its_reward(run_dir: Path) -> None:
    first, second = stored(run_dir, step=1)
    low = msgspec.structs.replace(first, group=with_rewards(first.group, 0.1, 0.3))
    high = msgspec.structs.replace(second, group=with_rewards(second.group, 0.9, 0.7))
    every = [Sample(rollout=r, index=i, decode=str) for r in (low, high) for i in (0, 1)]
    for sign, expected in (
        (0, [(low, 0), (high, 0)]),
        (1, [(high, 0), (low, 1)]),
        (-1, [(low, 0), (high, 1)]),
    ):
        assert [(s.rollout, s.index) for s in choose(every, sign=sign)] == expected


def test_the_command_shows_samples_with_their_rewards(run_dir: Path, command: Command) -> None:
    code, text, _ = command("rollouts", run_dir, "--failed")
    assert code == 0
    assert "text of t" in text
    assert "w3" in text
    assert "reward 0 (mean of its group 0.00), style 0.5\n" in text
    assert "versions 0 to 0" in text
    assert (
        "no such rollout; steps 1 to 2 are stored"
        in command("rollouts", run_dir, "--step", "9").err
    )
    assert command("rollouts", run_dir, "--best", "--worst").code == 2


ALL = list(range(1, 13))


@pytest.mark.parametrize(
    ("recording", "total", "free", "kept"),
    [
        ("off", 250, 99, []),
        ("times", 250, 99, [11, 12]),
        # GB; a large disk may be used to 98 %.
        ("full", 250, 6, ALL),
        ("full", 250, 4, [11, 12]),
        ("full", 20, 4, ALL),
        ("full", 20, 1, [11, 12]),
    ],
)
async def test_the_newest_steps_can_be_read_and_all_of_them_until_the_disk_is_nearly_full(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recording: str,
    total: int,
    free: int,
    kept: list[int],
) -> None:
    usage = SimpleNamespace(total=total * 10**9, free=free * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    async with opened(tmp_path, recording=recording) as service:
        for version in range(12):
            await step(service, version)
            await forget(service, version + 1)
        if free < 5:
            # One step in ten is deleted at each checkpoint, the oldest first.
            assert service.store.last_not_kept("full", 200) == (29 if kept != ALL else 0)
    with reading(tmp_path) as connection:
        assert complete_steps(connection) == kept
