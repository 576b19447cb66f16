"""The data that `async-rl rollouts` reads from a run's store, and its output."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from buffer_support import forget, make_config, opened, put, step, tickets, train
from tokenizers import Tokenizer, models

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import Rollout, complete_steps, rollouts
from async_rl.composition.compose import write_config
from async_rl.core.types import Group
from async_rl.launchers import cli
from async_rl.launchers.commands.stored import choose
from async_rl.protocol.learner import KeepAdvantages
from async_rl.runs.samples import Sample, samples
from async_rl.runs.view.tokens import tokens_of
from async_rl.runtime.context import Control

WORDS = [f"w{i} " for i in range(5)]


async def make_history(path: Path) -> None:
    """Two steps of two groups of two; the samples of group 1 failed; two groups more are ready."""
    async with opened(path) as service:
        for version in range(2):
            versions = [max(version - 1, 0), version, version]
            for ticket in await tickets(service, version):
                await put(service, ticket, passes=ticket.group_id != 1, versions=versions)
            ids = await train(service, version)
        # Another rank has the second samples, and is faster.
        for number in (1, 0):
            rows = [np.full(3, number - 0.5, dtype=np.float32)] * 3
            samples = [(group_id, number) for group_id in [*ids, 999]]
            await service.keep_advantages(KeepAdvantages(samples=samples, rows=rows))


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


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["async-rl", "rollouts", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    out, err = capsys.readouterr()
    return caught.value.code, out + err


def test_a_step_has_the_groups_that_it_trained_with_their_prompts(run_dir: Path) -> None:
    found = stored(run_dir, step=1)
    assert [(r.group.group_id, r.step, r.prompt) for r in found] == [
        (r.group.group_id, 1, f"text of {r.group.prompt_id}") for r in found
    ]
    assert len(found) == 2
    assert stored(run_dir, step=7) == []


def test_advantages_are_kept_of_the_groups_that_are_stored(run_dir: Path) -> None:
    assert [r.advantages for r in stored(run_dir, step=1)] == [None, None]
    for rollout in stored(run_dir, step=2):
        first, second = (sample.response_length for sample in rollout.group.trajectories)
        assert rollout.advantages is not None
        assert rollout.advantages.tolist() == [-0.5] * first + [0.5] * second
    with reading(run_dir) as connection:
        assert connection.execute("SELECT count(*) FROM advantages").fetchone() == (4,)


def test_tokens_have_the_grade_of_their_probability(run_dir: Path) -> None:
    group = stored(run_dir)[0].group
    sample = msgspec.structs.replace(
        group.trajectories[0],
        behavior_logprobs=np.log(np.array([1, 1, 0.6, 0.95, 0.05], np.float32)),
    )
    group = msgspec.structs.replace(group, trajectories=[sample, group.trajectories[1]])
    rollout = Rollout(group=group, prompt="", step=None, advantages=None)
    tokens = tokens_of(Sample(rollout=rollout, index=0, decode=lambda ids: "a" * len(ids)))
    assert [token.probability_grade for token in tokens] == [2, 3, 0]


def test_without_a_step_the_newest_groups_come_first_trained_or_not(run_dir: Path) -> None:
    ids = [r.group.group_id for r in stored(run_dir)]
    assert ids == sorted(ids, reverse=True)
    assert {r.step for r in stored(run_dir)} == {None, 1, 2}
    assert [r.group.group_id for r in stored(run_dir, most=1)] == ids[:1]
    with reading(run_dir) as connection:
        assert complete_steps(connection) == [1, 2]


def test_one_sample_of_each_group_is_chosen_by_its_reward(run_dir: Path) -> None:
    first, second = stored(run_dir, step=1)
    low = msgspec.structs.replace(first, group=with_rewards(first.group, 0.1, 0.3))
    high = msgspec.structs.replace(second, group=with_rewards(second.group, 0.9, 0.7))
    every = [Sample(rollout=r, index=i, decode=str) for r in (low, high) for i in (0, 1)]

    def chosen(sign: int) -> list[tuple[Rollout, int]]:
        return [(sample.rollout, sample.index) for sample in choose(every, sign=sign)]

    assert chosen(0) == [(low, 0), (high, 0)]
    assert chosen(1) == [(high, 0), (low, 1)]
    assert chosen(-1) == [(low, 0), (high, 1)]


def test_failed_leaves_those_that_passed_out(run_dir: Path) -> None:
    found = samples(run_dir, step=None, failed=True, most=99)
    assert {sample.rollout.group.group_id for sample in found} == {1}
    assert "w3" in found[0].response


def test_the_command_shows_prompt_response_reward_and_verdicts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = shown(monkeypatch, capsys, str(run_dir), "--failed")
    assert code == 0
    assert "text of t" in text
    assert "w3" in text
    assert "reward 0 (mean of its group 0.00), style 0.5\n" in text
    assert "versions 0 to 0" in text


def test_a_step_that_is_not_stored_is_told_with_those_that_are(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        "no such rollout; steps 1 to 2 are stored"
        in shown(monkeypatch, capsys, str(run_dir), "--step", "9")[1]
    )


@pytest.mark.parametrize(
    ("recording", "readable"), [("off", []), ("times", [2, 3]), ("full", [1, 2, 3])]
)
async def test_the_newest_steps_can_be_read_after_the_end_though_its_checkpoint_needs_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recording: str,
    readable: list[int],
) -> None:
    # With recording=full a nearly full disk of this machine would cost the oldest step.
    monkeypatch.setattr("async_rl.buffer.store.store.LEAST_FREE_BYTES", 0)

    async with opened(tmp_path, recording=recording) as service:
        for version in range(3):
            await step(service, version)
        await forget(service, 3)
    with reading(tmp_path) as connection:
        assert complete_steps(connection) == readable


def test_settings_that_make_no_sense_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys, str(run_dir), "--best", "--worst")[0] == 2
