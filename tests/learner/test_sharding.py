from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import (
    make_groups,
    make_trainer,
    offloading_trainer,
    optimizers_of,
    policy_of,
    relative_difference,
    spy_on_gradients,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from async_rl.learner.host_memory import Resting
from async_rl.learner.sharding import local
from async_rl.learner.units import units

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


@pytest.mark.covers("wrap_policy, min_num_params")
def test_modules_of_the_wanted_size_are_the_units(model_path: Path) -> None:
    lm = Qwen3ForCausalLM.from_pretrained(model_path)
    layer = lm.model.layers[0]
    kept = {lm.get_input_embeddings(), lm.get_output_embeddings()}

    def kinds(min_params: int) -> list[str]:
        return [
            type(m).__name__
            for m in units(lm, blocks=["Qwen3DecoderLayer"], min_params=min_params, kept=kept)
        ]

    size = sum(p.numel() for p in layer.parameters())
    mlp = sum(p.numel() for p in layer.mlp.parameters())
    assert kinds(0) == ["Qwen3DecoderLayer"] * 2
    assert kinds(size) == ["Qwen3DecoderLayer"] * 2
    assert kinds(mlp) == ["Qwen3MLP"] * 2, "what is left of the layer is smaller"
    assert kinds(2 * size) == [], (
        "a list of layers is never called, and the embeddings stay outside"
    )


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


@pytest.mark.parametrize(
    ("offload", "moved"),
    [("none", {"models", "moments"}), ("optimizer", {"models"}), ("parameters", set())],
)
def test_what_is_kept_off_the_device_is_not_moved_to_it(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process_group: None,
    offload: str,
    moved: set[str],
) -> None:
    trainer = offloading_trainer(model_path, "ppo_code", offload=offload)
    trainer.step(make_groups(0), 0)
    seen: set[str] = set()
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_, **__: seen.add("models"))
    trainer.device = torch.device("meta")
    trainer.enter_device()
    for optimizer in optimizers_of(trainer):
        for state in optimizer.torch_optimizer.state.values():
            if state["exp_avg"].is_meta and state["exp_avg_sq"].is_meta:
                seen.add("moments")
    assert seen == moved


@pytest.mark.parametrize("conf", ["grpo_code", "ppo_code"])
def test_one_rank_gathers_a_layer_once_for_all_passes_and_trains_the_same(
    model_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    gathered: list[object] = []
    joined: list[object] = []
    plain = FSDPParamGroup._to_unsharded
    join = _fsdp_param_group.foreach_reduce
    monkeypatch.setattr(
        _fsdp_param_group, "foreach_reduce", lambda *given: joined.append(1) or join(*given)
    )

    def count(self: FSDPParamGroup) -> None:
        gathered.append(self)
        plain(self)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", count)
    # Several passes without and with a gradient, several updates, and steps without the policy.
    knobs = ["model.dtype=bfloat16", "learner.budget_tokens=60", "learner.minibatches=2"]
    if conf == "ppo_code":
        knobs.append("algorithm.advantage.critic.warmup_steps=1")
    numbers, joins, weights, outputs = [], [], [], []
    for is_recomputed in (False, True):
        # Where activations are recomputed memory is short, and layers are gathered for each pass.
        trainer = make_trainer(
            model_path, conf, *knobs, f"learner.gradient_checkpointing={is_recomputed}"
        )
        for version in range(3):
            gathered.clear()
            joined.clear()
            trainer.step(make_groups(version, version=version), version)
            numbers.append(len(gathered))
            joins.append(len(joined))
            assert all(isinstance(p, DTensor) for p in policy_of(trainer).parameters())
        outputs.append(trainer.logprobs([np.arange(9)])[0])
        assert all(isinstance(p, DTensor) for p in policy_of(trainer).parameters())
        weights.append([t.clone() for t in trainer.full_tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert (outputs[0] == outputs[1]).all()
    # Units are the root and two layers, of the policy and of the critic; the reference of PPO is
    # gathered for each pass.
    assert sum(numbers[:3]) < sum(numbers[3:]) / 2
    if conf == "grpo_code":
        assert max(numbers[:3]) == 2 * 3
        # The gradients of all passes of an update are added up first.
        assert joins[:3] == [2 * 3] * 3
        assert sum(joins[3:]) > sum(joins[:3])
