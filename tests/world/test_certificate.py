"""The certificate of a run names planted faults of other systems, and none in a sound run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pytest
from explore import broken, certified
from loop import current
from msgspec.structs import replace
from world import Fault, World, story

from async_rl.buffer import changes
from async_rl.buffer.store import reader
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import NO_VERSION, FloatArray, Group, IntArray, Trajectory
from async_rl.protocol.generator import LoadReport
from async_rl.runs.certificate.statements import Verdict

COMPUTED = "each generator computes with the weights that it was sent"
ONCE = "each position of the data order was issued exactly once"
ORDERED = "each position was issued for the prompt of data.order"
LENGTHS = "trained groups are like generated ones: response length, tokens"
ATTEMPTS = "attempts did not fail because they were long"
WITHIN = "the samples of a group are independent"
ACROSS = "groups of one prompt are independent, also of different generators"
AUDIT = "the ledger and the checkpoints keep their promises (async-rl ledger --audit)"
MAX_LONG = 6
NUM_TOKENS = 8


def played(path: Path, faults: Sequence[Fault] = (), **given: Any) -> World:
    return story(path, faults, **{"num_steps": 60, "weights__probe_every_pushes": 10, **given})


def broken_in(path: Path, faults: Sequence[Fault] = (), **given: Any) -> dict[str, str]:
    return broken(certified(played(path, faults, **given)))


def test_a_run_without_a_fault_has_no_broken_statement(tmp_path: Path) -> None:
    certificate = certified(played(tmp_path))
    assert broken(certificate) == {}
    unknown = [each.promise for each in certificate.statements if each.verdict is Verdict.UNKNOWN]
    # The world has no losses, no launcher that records the code, and keeps two steps of responses.
    assert [promise for promise in unknown if "independent" not in promise] == [
        "at age 0 engine and learner agree within 0.001 nats (model.dtype=float32)",
        "the code, packages and settings of each start are recorded",
    ]


def slow_learner(identity: int, rows: list[IntArray]) -> list[FloatArray]:
    """Log-probs whose change by a step is a hundredth of the probe's tolerance."""
    rng = np.random.default_rng(identity)
    return [(-3.0 + 1e-5 * rng.normal(size=len(row))).astype(np.float32) for row in rows]


def test_weights_that_never_arrive_at_one_engine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = parts.Engine.load_weights

    async def keeps_old(self: parts.Engine, manifest: Any, source: Any) -> LoadReport:
        before = self.identity
        report = await load(self, manifest, source)
        if current().name == "generator-1" and before >= 0:
            self.identity = before  # the call succeeds, and the engine keeps its weights
        return report

    monkeypatch.setattr(parts, "logprobs_of", slow_learner)
    assert broken_in(tmp_path / "sound") == {}
    monkeypatch.setattr(parts.Engine, "load_weights", keeps_old)
    found = broken_in(tmp_path / "stale")
    assert set(found) == {COMPUTED}
    assert found[COMPUTED].startswith("generator-1 (pid ")
    assert "reported version 1 to 60 and kept its old weights" in found[COMPUTED]
    assert "kept its old weights: its log-probs did not follow the learner's" in found[COMPUTED]


def test_prompts_that_are_skipped_after_a_resume_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = reader.StoreReader.recover

    def skips(self: reader.StoreReader, steps_reused: int) -> Any:
        recovered = recover(self, steps_reused)
        if recovered.next_index:
            recovered = dataclasses.replace(recovered, next_index=recovered.next_index + 3)
        return recovered

    faults = [Fault(12.0, "lose_all")]
    assert broken_in(tmp_path / "sound", faults) == {}
    monkeypatch.setattr(reader.StoreReader, "recover", skips)
    found = broken_in(tmp_path / "skips", faults)
    assert set(found) == {ONCE, AUDIT}
    skipped = found[ONCE].splitlines()[0]
    assert skipped.startswith("position ")
    assert " was skipped after the start of " in skipped
    assert len(skipped.partition("(")[2].partition(")")[0].split(", ")) == 3, "three prompts"


def test_another_order_of_the_data_is_named(tmp_path: Path) -> None:
    # A resume that shuffles anew issues other prompts than the order of the run says.
    found = broken(certified(played(tmp_path, num_steps=20), order=2))
    assert set(found) == {ORDERED}
    assert found[ORDERED].startswith("position 1 was issued for t0, not for t6\n")


def test_complete_groups_that_are_dropped_because_they_are_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts_of = changes.facts_of

    def without_long(group: Any) -> Any:
        facts = facts_of(group)
        is_long = facts.response_length_mean > MAX_LONG and group.purpose == "train"
        return replace(facts, oldest_version=NO_VERSION) if is_long else facts

    monkeypatch.setattr(changes, "facts_of", without_long)
    assert "that were left out the mean differs by -" in broken_in(tmp_path)[LENGTHS]


def test_attempts_that_are_discarded_because_they_are_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused_if_long(group: Group) -> Group:
        longest = max(sample.response_length for sample in group.trajectories)
        if longest > MAX_LONG and group.purpose == "train":
            raise InfrastructureError("it takes too long")
        return group

    monkeypatch.setattr(parts.Rollouts, "group", changed(refused_if_long))
    assert "that were left out the mean differs by -" in broken_in(tmp_path)[ATTEMPTS]


def test_attempts_that_fail_by_chance_are_no_bias(tmp_path: Path) -> None:
    certificate = certified(played(tmp_path, failed_verdicts=0.2))
    assert broken(certificate) == {}
    [attempts] = [each for each in certificate.statements if each.promise == ATTEMPTS]
    assert any("one-sided" in line for line in attempts.evidence)


def changed(change: Callable[[Group], Group]) -> Any:
    """Rollouts whose groups are changed before they are returned."""
    write = parts.Rollouts.group

    async def group(self: parts.Rollouts, *arguments: Any, **kinds: Any) -> Group:
        return change(await write(self, *arguments, **kinds))

    return group


def draws(seed_of: Callable[[Group, int], Any]) -> Any:
    """Rollouts whose tokens are draws of a uniform policy over 50 tokens, from this seed."""
    length = 2 + NUM_TOKENS
    is_trained = np.arange(length) >= 2

    def drawn(group: Group, index: int, sample: Trajectory) -> Trajectory:
        tokens = np.random.default_rng(seed_of(group, index)).integers(0, 50, NUM_TOKENS)
        return replace(
            sample,
            token_ids=np.array([1, 2, *tokens], np.int32),
            versions=np.where(is_trained, sample.versions[2], NO_VERSION).astype(np.int32),
            behavior_logprobs=np.where(is_trained, -math.log(50), 0.0).astype(np.float32),
            loss_mask=is_trained,
        )

    def redrawn(group: Group) -> Group:
        samples = [drawn(group, index, sample) for index, sample in enumerate(group.trajectories)]
        return replace(group, trajectories=samples)

    return changed(redrawn)


@pytest.mark.parametrize(
    ("seed_of", "promises"),
    [
        (lambda group, index: (group.group_id, group.attempt, index), set()),
        # Each engine starts each request with its one seed.
        (lambda group, index: (group.group_id, group.attempt), {WITHIN}),
        # All engines draw the same for a prompt, whichever of them writes it.
        (lambda group, index: (int(group.prompt_id[1:]), index), {ACROSS}),
    ],
    ids=["own seeds", "shared in a group", "shared by engines"],
)
def test_a_seed_that_samples_or_engines_share_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed_of: Any, promises: set[str]
) -> None:
    monkeypatch.setattr(parts.Rollouts, "group", draws(seed_of))
    found = broken_in(tmp_path, num_steps=40, recording="full")
    assert set(found) == promises
    assert all("a seed is shared" in text for text in found.values())
    if ACROSS in promises:
        assert "generator-0 and generator-1" in found[ACROSS]


def test_twenty_kills_are_survived_and_listed(tmp_path: Path) -> None:
    names = ("generator-0", "learner-0", "buffer", "generator-1", "")
    times_s = [6.0 + 7.0 * number for number in range(20)]
    kills = [
        Fault(at_s, "kill", (name,)) if name else Fault(at_s, "lose_all")
        for at_s, name in zip(times_s, names * 4, strict=True)
    ]
    world = played(tmp_path, kills, num_steps=150)
    assert world.problems == []
    certificate = certified(world)
    assert broken(certificate) == {}
    evidence = "\n".join(line for each in certificate.statements for line in each.evidence)
    assert "5 starts, 4 of them killed" in evidence
    for name in names[:-1]:
        assert f"{name} is restarted: {name} was ended by SIGKILL" in evidence
