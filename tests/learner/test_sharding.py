from pathlib import Path

import pytest
import torch
from learner_support import (
    equal,
    make_groups,
    make_trainer,
    offloading_trainer,
    policy_of,
    relative_difference,
    spy_on_gradients,
    weights_of,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from async_rl.learner.host_memory import Resting
from async_rl.learner.sharding import local

CPU = torch.device("cpu")


@pytest.mark.covers("param_offload, optimizer_offload")
@pytest.mark.parametrize("knobs", [("optimizer", 0), ("parameters", 0), ("parameters", 1000)])
def test_neither_offloading_nor_the_shard_units_change_what_is_trained(
    model_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch, knobs: tuple[str, int]
) -> None:
    offload, min_params = knobs
    collected = spy_on_gradients(monkeypatch)
    plain = make_trainer(model_path, "ppo_code")
    other = offloading_trainer(
        model_path, "ppo_code", f"learner.shard_units={min_params}", offload=offload
    )
    for trainer in (plain, other):
        for version in range(2):
            trainer.step(make_groups(version, version=version), version)
    for gradients in collected.values():
        half = len(gradients) // 2
        assert relative_difference(gradients[half], gradients[0]) < 1e-6
        assert relative_difference(gradients[-1], gradients[half - 1]) < 1e-3
    for mine, theirs in zip(plain.full_tensors(), other.full_tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["bare", "wrapped"])
def test_leaving_the_device_between_steps_changes_nothing(
    model_path: Path, process_group: None, dtype: str
) -> None:
    weights, places = [], []
    resting = Resting()
    for leaves in (False, True):
        trainer = make_trainer(model_path, "ppo_code", f"model.dtype={dtype}")
        models, moments = trainer._movable
        for version in range(3):
            trainer.step(make_groups(version, version=version), version)
            if leaves:
                resting.leave(models, moments)
                tensors = [p for model in models for p in model.parameters()]
                tensors += [state[name] for _, state, name in moments]
                places.append([local(tensor).data_ptr() for tensor in tensors])
                resting.enter(models, moments, CPU)
                # A device gives other memory each time.
                for model in models:
                    model._apply(torch.clone)
                for _, state, name in moments:
                    state[name] = state[name].clone()
        weights.append(list(trainer.full_tensors()))
    assert places[0] == places[1] == places[2], "the memory is used again"
    for mine, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_one_rank_gathers_a_layer_once_for_all_passes_and_trains_the_same(
    model_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[object] = []
    plain = FSDPParamGroup._to_unsharded
    monkeypatch.setattr(
        FSDPParamGroup, "_to_unsharded", lambda group: (gathered.append(group), plain(group))
    )
    # Several passes without and with a gradient, and several updates.
    knobs = ["model.dtype=bfloat16", "learner.budget_tokens=60", "learner.minibatches=2"]
    numbers, weights = [], []
    for is_recomputed in (False, True):
        # Where activations are recomputed memory is short, and layers are gathered for each pass.
        checkpointing = f"learner.gradient_checkpointing={is_recomputed}"
        trainer = make_trainer(model_path, "grpo_code", *knobs, checkpointing)
        for version in range(2):
            gathered.clear()
            trainer.step(make_groups(version, version=version), version)
            assert all(isinstance(p, DTensor) for p in policy_of(trainer).parameters())
        numbers.append(len(gathered))
        weights.append(weights_of(trainer))
    assert equal(*weights)
    # Units are the root and two layers, once for each of two updates.
    assert numbers[0] == 2 * 3 < numbers[1] / 2
