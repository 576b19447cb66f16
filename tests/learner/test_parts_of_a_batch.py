"""Ranks that have a part of a batch each compute what one rank with the whole batch computes."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import make_config, make_groups, make_trainer
from tables import table
from torch import Tensor

from async_rl.algorithms.parts import ALONE, Across
from async_rl.batching.batch import Batch, BatchPart, collate_part, whole
from async_rl.config.run import RunConfig
from async_rl.core.errors import StalenessError
from async_rl.core.types import Group, StepScore, Trajectory
from async_rl.learner.models import PolicyOutput, Values
from async_rl.learner.objective import compute_targets, trained_mask
from async_rl.learner.objective_state import Moments

CPU = torch.device("cpu")
SETTINGS: dict[str, tuple[str, ...]] = table(__file__, "settings")


class Meeting(Across):
    """Lets threads compute sums and maxima together, as ranks do with collectives."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Tensor] = []
        self.sum = lambda x: self._join(x, lambda all_: all_.sum(0))
        self.maximum = lambda x: self._join(x, lambda all_: all_.amax(0))

    def _join(self, x: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        if self._barrier.wait() == 0:
            self._values = []
        self._barrier.wait()
        self._values.append(x)
        self._barrier.wait()
        found = combine(torch.stack(self._values))
        self._barrier.wait()
        return found


def parts_of(groups: Sequence[Group], owners: Sequence[int], ranks: int) -> list[BatchPart]:
    everything = whole(groups)
    pairs = list(zip(owners, everything.trajectories, strict=True))
    return [
        BatchPart(
            heads=everything.heads,
            owners=owners,
            number=rank,
            trajectories=[t for owner, t in pairs if owner == rank],
        )
        for rank in range(ranks)
    ]


def with_steps(t: Trajectory) -> Trajectory:
    """The sample with two scored steps, the second at its end."""
    ends = {max(1, t.response_length // 2): 0.5, t.response_length: 1.0}
    steps = tuple(StepScore(end_tokens=end, reward=r) for end, r in ends.items())
    return msgspec.structs.replace(t, score=msgspec.structs.replace(t.score, steps=steps))


def outputs_of(batch: Batch) -> PolicyOutput:
    """Made-up outputs, which depend on a token and its sequence only."""
    noise = torch.sin(batch.sequence_index * 7.0 + batch.behavior_logprobs * 3)
    after_end = torch.zeros(batch.num_sequences)
    mine = torch.tensor(list(batch.offsets), dtype=torch.int64)
    after_end[mine] = torch.cos(mine * 5.0)
    return PolicyOutput(
        logprobs=batch.behavior_logprobs + 0.1 * noise,
        entropies=noise.abs(),
        ref_logprobs=batch.behavior_logprobs - 0.2 * noise,
        kl=None,
        values=Values(noise, after_end),
    )


@functools.cache
def config_of(case: str) -> RunConfig:
    return make_config(*SETTINGS[case])


def computed(case: str, part: BatchPart, across: Across) -> tuple[Batch, dict[str, Any]]:
    config = config_of(case)
    batch = collate_part(part, device=CPU, across=across)
    mask = trained_mask(batch, version=3, config=config)
    outputs = outputs_of(batch)
    targets = compute_targets(
        batch, mask, outputs, config=config, kl_coef=0.1, moments=Moments(0.5, 4.25, 1.0)
    )
    moments = Moments().observed(targets.raw_advantages[mask], kind="ma", across=across)
    found = {
        "mask": mask,
        "advantages": targets.advantages,
        "returns": targets.returns,
        "mean": across.mean(outputs.entropies),
        "largest": across.largest(outputs.entropies),
        "variance": across.variance(outputs.entropies),
        "moments": (moments.total, moments.total_square, moments.weight),
    }
    return batch, found


@pytest.mark.parametrize("case", SETTINGS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 3), data=st.data())
def test_targets_and_statistics_do_not_depend_on_the_owners(
    case: str, seed: int, ranks: int, data: st.DataObject
) -> None:
    groups = make_groups(seed, num_groups=3, size=3, version=3)
    for group in groups:
        group.trajectories[:] = map(with_steps, group.trajectories)
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=9, max_size=9))
    batch, expected = computed(case, whole(groups), ALONE)
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        results = list(
            pool.map(lambda part: computed(case, part, meeting), parts_of(groups, owners, ranks))
        )
    for mine, found in results:
        for name in ("mean", "largest", "variance", "moments"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        for s in mine.offsets:
            size = mine.response_lengths[s]
            here = slice(mine.offsets[s], mine.offsets[s] + size)
            there = slice(batch.offsets[s], batch.offsets[s] + size)
            for name in ("mask", "advantages", "returns"):
                if expected[name] is not None:
                    torch.testing.assert_close(
                        found[name][here], expected[name][there], rtol=1e-4, atol=1e-5
                    )


def test_a_token_that_one_rank_must_refuse_is_refused_by_all_of_them() -> None:
    """Otherwise the others would wait for it until the collective times out."""
    groups = make_groups(num_groups=1, size=2, version=9)
    config = make_config("grpo_code", "buffer.max_staleness_versions=2")
    first = groups[0].trajectories[0]
    first.versions[first.versions >= 0] = 3
    meeting = Meeting(2)

    def refused(part: BatchPart) -> str:
        batch = collate_part(part, device=CPU, across=meeting)
        with pytest.raises(StalenessError) as caught:
            trained_mask(batch, version=9, config=config)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(refused, parts_of(groups, [0, 1], 2)))
    assert messages[0] == messages[1]
    assert "a token is 6 versions old" in messages[0]


def test_owners_are_balanced_in_every_minibatch_and_keep_a_prompt_together(
    model_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups(num_groups=16, size=4)
    trainer = make_trainer(model_path, "grpo_code", "learner.minibatches=2")
    heads = whole(groups).heads
    assert trainer.owners(heads, 0) == [0] * 64
    forward = trainer._forward
    monkeypatch.setattr(forward, "_ranks", dataclasses.replace(forward._ranks, world_size=2))
    owners = trainer.owners(heads, 0)
    # The few groups without an advantage are shared out separately, one sequence at a time.
    trained = [g for g, head in enumerate(heads) if not head.is_uniform]
    assert len(trained) >= 8
    assert all(len(set(owners[4 * g : 4 * g + 4])) == 1 for g in trained)
    sizes = [sample.num_tokens for head in heads for sample in head.samples]
    for minibatch in forward._minibatches(collate_part(whole(groups), device=CPU), 0, 0):
        loads = [sum(sizes[s] for s in minibatch if owners[s] == rank) for rank in (0, 1)]
        assert max(loads) < 2 * min(loads)
