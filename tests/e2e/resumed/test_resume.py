"""A killed run ends as if nothing had happened, refuses what it cannot continue with, and continues
on another machine.
"""

import collections
import itertools
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e_support import LiveRun, async_rl, open_to_others
from resumed_run import LAST, Resumed

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rows(resumed: Resumed) -> list[dict[str, Any]]:
    return resumed.run.rows


def test_each_step_is_there_once_and_each_group_is_trained_once(
    resumed: Resumed, rows: list[dict[str, Any]]
) -> None:
    assert [row["step"] for row in rows] == list(range(1, LAST + 1))
    found = resumed.run.audit()
    assert (found["problems"], found["num_steps"]) == ([], LAST)
    assert found["num_undone_steps"] >= 2
    assert resumed.run.processes() == []
    assert list(resumed.copies.rglob("ledger_*.sqlite"))
    assert open_to_others(resumed.copies) == []
    assert f"resuming with num_steps={LAST} (was 400)" in resumed.run.terminal


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_is_resumed(resumed: Resumed) -> None:
    damaged = resumed.damaged
    assert damaged.with_name(f"{damaged.name}.set_aside").is_dir()
    older = f"step_{int(damaged.name.removeprefix('step_')) - 3:06d}"
    log = (resumed.directory / "logs" / "learner-0.log").read_text()
    assert log.rpartition("resumes from ")[2].split()[0] == str(damaged.with_name(older))


def test_steps_that_were_lost_are_made_again_bit_for_bit(resumed: Resumed) -> None:
    """The weights after them, and so the samples too, are those of the killed lives."""
    lines = (resumed.directory / "versions.jsonl").read_bytes().splitlines()
    made = [msgspec.json.decode(line) for line in lines]
    checksums = collections.defaultdict(list)
    for version in made:
        checksums[version["version"]].append(version["checksum"])
    assert checksums.keys() == set(range(LAST + 1))
    # A restart publishes the weights of its checkpoint; what follows was trained again.
    twice = {version: sums for version, sums in checksums.items() if len(sums) > 1 and version % 3}
    assert len(twice) >= 2
    assert [version for version, sums in twice.items() if len(set(sums)) > 1] == []


def test_the_run_is_synchronous_with_staleness_0(rows: list[dict[str, Any]]) -> None:
    assert {row["staleness/max_versions"] for row in rows} == {0}
    assert max(row["policy/kl_behavior_proximal"] for row in rows) < 1e-6


def test_the_critic_is_trained_and_the_return_is_the_sum_of_the_scores_ahead(
    resumed: Resumed, rows: list[dict[str, Any]]
) -> None:
    assert all(row["value/loss"] > 0 and "policy/kl_reference" in row for row in rows)
    # Its values are 0 before the first update only. That the loss falls is a fact of more steps
    # than these (tests/learner/test_trainer.py).
    explained = [row["value/explained_variance"] for row in rows]
    assert explained[0] == 0
    assert any(explained[1:])
    with reading(resumed.directory) as connection:
        found = rollouts(connection, step=1, most=4)
    samples = [sample for each in found for sample in each.group.trajectories]
    assert len(samples) == 16
    assert all(sample.score.steps for sample in samples)
    # Critic and KL are 0 before the first update.
    ahead = []
    for t in samples:
        steps = [(-1.0, 0), *((step.reward, step.end_tokens) for step in t.score.steps)]
        gains = [(now - before, end) for (before, _), (now, end) in itertools.pairwise(steps)]
        ahead += [sum(gain for gain, end in gains if end > k) for k in range(t.response_length)]
    assert rows[0]["value/return_mean"] == pytest.approx(sum(ahead) / len(ahead), abs=1e-4)


def test_what_the_planned_batches_contradict_is_refused(resumed: Resumed) -> None:
    done = async_rl("resume", str(resumed.directory), "buffer.groups_per_step=8", "num_steps=20")
    assert done.returncode == 2, done
    said = done.stdout + done.stderr
    assert "buffer.groups_per_step=8: was 4, and the planned batches have that many groups" in said


NO_ROOM = (65_536, resource.RLIM_INFINITY)
"""A limit on the size of files, set on running processes, stands for a full disk: the system
refuses the same writes.
"""


def test_a_run_continues_on_another_machine_until_that_has_no_room(
    resumed: Resumed, tmp_path: Path
) -> None:
    copies = shutil.copytree(resumed.copies, tmp_path / "copies", copy_function=os.link)
    there = LiveRun(
        tmp_path / "there",
        "num_steps=400",
        f"checkpoint.mirror={copies}",
        "supervisor.max_restarts=1",
        resumes=True,
        copy=f"file://{copies}/run",
    )
    try:
        there.until((copies / "run" / "step_000012.complete").is_file, "a copied checkpoint")
        for process in ("buffer", "learner-0", "learner-1"):
            resource.prlimit(there.pid_of(process), resource.RLIMIT_FSIZE, NO_ROOM)
        resource.prlimit(there.process.pid, resource.RLIMIT_FSIZE, NO_ROOM)
        assert there.wait(timeout_s=120) == 1, there.terminal
    finally:
        there.end()
    said = " ".join(there.terminal.split())
    assert "free disk space" in said, there.terminal
    assert "Traceback" not in said
    assert there.processes() == []
    assert there.audit()["problems"] == []
    # Which process is the first to notice is up to the machine.
    assert re.search(r"(could not be|cannot be) (written|used)", there.terminal), there.terminal
    assert (there.run_dir / "checkpoints" / "step_000012").is_dir()
    steps = [row["step"] for row in there.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > LAST
