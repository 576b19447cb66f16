"""`async-rl replay` and `async-rl compare` on a run of two ranks that was killed twice."""

import contextlib
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from e2e_support import async_rl
from resumed_run import LAST, Resumed

from async_rl.core.checksums import checksum
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_replay_ends_with_the_weights_of_the_run_bit_for_bit(resumed: Resumed) -> None:
    done = async_rl("replay", str(resumed.directory))
    assert done.returncode == 0, done.stderr
    assert f"replays steps 1 to {LAST} of run from the start model" in done.stdout
    assert f"the weights equal the run's at all {LAST} compared steps" in done.stdout
    rows = (resumed.directory / "replays/1/metrics.jsonl").read_bytes().splitlines()
    recorded = (resumed.directory / "metrics.jsonl").read_bytes().splitlines()
    ours = {row["step"]: row for row in map(msgspec.json.decode, rows)}
    theirs = {row["step"]: row for row in map(msgspec.json.decode, recorded) if row["step"]}
    assert list(ours) == list(range(1, LAST + 1))
    for name in ("loss/policy", "value/loss", "policy/grad_norm", "reward/mean"):
        assert [row[name] for row in ours.values()] == [row[name] for row in theirs.values()]


def test_other_settings_than_the_objectives_are_refused_in_a_replay(resumed: Resumed) -> None:
    refused = async_rl("replay", str(resumed.directory), "generation.temperature=0.7")
    assert refused.returncode == 2
    assert "only algorithm.* and learner.* can change" in refused.stderr


def test_a_replay_names_the_step_whose_batch_was_damaged(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints/step_000003")
    change = msgspec.structs.replace
    with changing(copied) as store:
        store.execute("DELETE FROM blobs WHERE group_id=?", (first_group(store, step=1).group_id,))
        group = first_group(store, step=8)
        sample = group.trajectories[0]
        steps = [change(step, reward=step.reward + 0.5) for step in sample.score.steps]
        damaged = change(sample, score=change(sample.score, steps=steps))
        put(store, change(group, trajectories=[damaged, *group.trajectories[1:]]))
    done = async_rl("replay", str(copied), "--last", "8")
    assert done.returncode == 1, done.stderr
    assert "replays steps 7 to 8 of run from the checkpoint of step 6" in done.stdout
    assert "the weights differ from the run's from step 8 on" in done.stdout


@contextlib.contextmanager
def changing(run_dir: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(run_dir / "store.sqlite")) as store, store:
        yield store


def first_group(store: sqlite3.Connection, *, step: int) -> Group:
    (payload,) = store.execute(
        "SELECT payload FROM blobs JOIN groups USING (group_id) WHERE train_version=? ORDER BY"
        " group_id LIMIT 1",
        (step - 1,),
    ).fetchone()
    return read_group(payload).unpacked()


def put(store: sqlite3.Connection, group: Group) -> None:
    payload = pack_group(group)
    row = (payload, checksum(payload, group.group_id), group.group_id)
    store.execute("UPDATE blobs SET payload=?, checksum=? WHERE group_id=?", row)


def reward(copy: Path) -> None:
    with changing(copy) as store:
        group = first_group(store, step=3)
        rewards = [sample.score.reward for sample in group.trajectories]
        rewards[1] += 0.25
        row = (msgspec.json.encode(rewards).decode(), group.group_id)
        store.execute("UPDATE groups SET rewards=? WHERE group_id=?", row)


def token(copy: Path) -> None:
    with changing(copy) as store:
        group = first_group(store, step=4)
        sample = group.trajectories[2]
        ids = sample.token_ids.copy()
        ids[sample.prompt_length + 1] += 1
        samples = list(group.trajectories)
        samples[2] = msgspec.structs.replace(sample, token_ids=ids)
        put(store, msgspec.structs.replace(group, trajectories=samples))


def learning_rate(copy: Path) -> None:
    path = copy / "metrics.jsonl"
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    for row in rows:
        if row["step"] == 5:
            row["policy/lr"] *= 1.01
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def swapped_batch(copy: Path) -> None:
    steps = "(SELECT step_id FROM steps WHERE version=? AND undone_s IS NULL)"
    with changing(copy) as store:
        for old, new in ((2, -1), (6, 2), (-1, 6)):
            target = new if new < 0 else store.execute(f"SELECT {steps}", (new,)).fetchone()[0]
            source = old if old < 0 else store.execute(f"SELECT {steps}", (old,)).fetchone()[0]
            store.execute("UPDATE trained SET step_id=? WHERE step_id=?", (target, source))
            store.execute(
                "UPDATE groups SET train_version=? WHERE train_version=? AND state='trained'",
                (new - 1, old - 1),
            )


@pytest.mark.parametrize(
    ("inject", "expected"),
    [
        (reward, "differ at step 3: reward, prompt "),
        (token, "differ at step 4: sampled token, prompt "),
        (learning_rate, "differ at step 5: learning rate, policy/lr"),
        (swapped_batch, "differ at step 2: prompts of the batch, group "),
    ],
)
def test_an_injected_difference_is_found_at_its_place(
    resumed: Resumed, copied: Path, inject: Callable[[Path], None], expected: str
) -> None:
    inject(copied)
    done = async_rl("compare", str(resumed.directory), str(copied))
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    if inject is token:
        assert "sample 2, token " in done.stdout


def test_equal_runs_have_no_difference_but_their_settings(resumed: Resumed, copied: Path) -> None:
    done = async_rl("compare", str(resumed.directory), str(copied))
    assert done.returncode == 0, done.stderr
    assert f"no difference in the {LAST} steps that both runs have" in done.stdout
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("ranks: 2", "ranks: 1"))
    other = async_rl("compare", str(resumed.directory), str(copied))
    assert re.search(r"learner.ranks +2 +1", other.stdout), other.stdout
