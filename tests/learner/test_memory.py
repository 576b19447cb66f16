"""The settings that trade memory for time do what they say, and change no gradient; that gradients
are right is shown in test_steps_equal_the_oracle.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import (
    equal,
    equal_rewards,
    make_groups,
    make_trainer,
    offloading_trainer,
    policy_of,
    relative_difference,
    spy_on_gradients,
    weights_of,
)
from tables import table
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from async_rl.config import learner
from async_rl.core.errors import ConfigError
from async_rl.learner import sharding
from async_rl.learner.host_memory import Resting
from async_rl.learner.sharding import local
from async_rl.learner.update import Updater

CPU = torch.device("cpu")
BASE = (
    "learner.minibatches=2",
    "learner.epochs=2",
    "algorithm.entropy_coef=0.01",
    "generation.temperature=0.8",
)


@contextmanager
def forwards() -> Iterator[list[tuple[str, bool, int]]]:
    """The class of each module that runs forward, whether with a gradient, and its tokens."""
    seen: list[tuple[str, bool, int]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        size = inputs[0].shape[-1] if isinstance(module, nn.Embedding) else 0
        seen.append((type(module).__name__, torch.is_grad_enabled(), size))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.proves("learner.budget_tokens", "learner.forward_budget_tokens")
def test_passes_with_and_without_a_gradient_have_their_budgets(model_path: Path) -> None:
    def sizes(budget: int, forward: str) -> dict[bool, list[int]]:
        """Tokens of the policy's passes, with and without a gradient."""
        knobs = [f"learner.budget_tokens={budget}", f"learner.forward_budget_tokens={forward}"]
        trainer = make_trainer(model_path, "ppo_code", *knobs)
        with forwards() as seen:
            trainer.step(make_groups(), 0)
        return {
            kind: [size for *module, size in seen if module == ["Embedding", kind]]
            for kind in (True, False)
        }

    whole, same, large = sizes(8192, "null"), sizes(24, "null"), sizes(24, "70")
    assert len(whole[True]) < len(same[True])
    assert max(same[True]) <= 24 < max(whole[True])
    assert max(same[False]) <= 24 < max(large[False]) <= 70
    assert len(large[False]) < len(same[False])
    assert large[True] == same[True]


@pytest.mark.proves("learner.gradient_checkpointing")
def test_with_gradient_checkpointing_each_layer_runs_forward_again(model_path: Path) -> None:
    counts = []
    for checkpointing in ("false", "true"):
        setting = f"learner.gradient_checkpointing={checkpointing}"
        trainer = make_trainer(model_path, "grpo_code", setting)
        with forwards() as seen:
            trainer.step(make_groups(), 0)
        counts.append([each[:2] for each in seen].count(("Qwen3DecoderLayer", True)))
    assert counts[1] == 2 * counts[0] > 0


@pytest.mark.proves("learner.shard_units", "learner.offload")
@pytest.mark.covers("wrap_policy, min_num_params")
def test_the_least_size_of_a_unit_decides_what_is_sharded_alone_and_kept_on_the_host(
    model_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[object] = []
    real = sharding.fully_shard

    def spy(module: nn.Module, **options: Any) -> Any:
        policies.append(options["offload_policy"])
        return real(module, **options)

    monkeypatch.setattr(sharding, "fully_shard", spy)

    def units(chosen: int | str, offload: str = "parameters") -> list[str]:
        trainer = offloading_trainer(
            model_path, "grpo_code", f"learner.shard_units={chosen}", offload=offload
        )
        modules = policy_of(trainer).modules()
        return [type(m).__name__.removeprefix("FSDP") for m in modules if isinstance(m, FSDPModule)]

    assert units(0, offload="none") == [], "one CPU in float32 needs no wrapper"
    assert units(0).count("Qwen3DecoderLayer") == 2
    assert units(10**9).count("Qwen3DecoderLayer") == 0
    named = units("[Qwen3MLP]")
    assert (named.count("Qwen3MLP"), named.count("Qwen3DecoderLayer")) == (2, 0)
    assert all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
    with pytest.raises(ConfigError, match=r"no module of the class Qwen9MLP; it has .*Qwen3MLP"):
        units("[Qwen9MLP]")


@pytest.mark.covers(
    "log_prob_micro_batch_size", "ppo_micro_batch_size", "enable_gradient_checkpointing"
)
@pytest.mark.parametrize("conf", ["ppo_code", "grpo_code"])
def test_memory_knobs_do_not_change_gradients(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    small = ("learner.budget_tokens=24", "learner.forward_budget_tokens=70")
    for knobs in ((), (*small, "learner.gradient_checkpointing=true")):
        if knobs:
            # Chunks of three rows.
            monkeypatch.setattr(learner, "CPU_LOGITS_MB", 0.0006)
        trainer = make_trainer(model_path, conf, *BASE, *knobs)
        trainer.step(make_groups(ages=(0, 1), version=1), 1)
    for name, gradients in collected.items():
        assert len(gradients) == 2 * 4
        for plain, other in zip(gradients[:4], gradients[4:], strict=True):
            assert relative_difference(other, plain) < 1e-6, name


def test_sequences_without_advantage_get_no_backward_pass_and_change_no_gradient(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = ("learner.budget_tokens=30", "learner.epochs=2", "learner.minibatches=2")
    groups = equal_rewards(make_groups(ages=(0, 1), version=1), every=2)
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    num_backward = 0
    backward = torch.Tensor.backward

    def counted(self: Tensor) -> None:
        nonlocal num_backward
        num_backward += 1
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    skipping = make_trainer(model_path, "grpo_code", *knobs).step(groups, 1)
    few, num_backward = num_backward, 0
    monkeypatch.setattr(
        Updater,
        "_has_gradient",
        lambda self, batch, mask: torch.ones(batch.num_sequences, dtype=torch.bool),
    )
    plain = make_trainer(model_path, "grpo_code", *knobs).step(groups, 1)
    assert few <= 0.7 * num_backward
    half = len(collected["policy"]) // 2
    for mine, other in zip(collected["policy"][:half], collected["policy"][half:], strict=True):
        assert relative_difference(mine, other) < 1e-6
    for name, value in plain.scalars.items():
        if not name.startswith("time/"):
            assert skipping.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("knobs", "is_silent"), table(__file__, "a_batch_of_equal_rewards"))
def test_a_batch_of_equal_rewards_is_silent_only_where_advantages_are_the_whole_loss(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: list[str], is_silent: bool
) -> None:
    trainer = make_trainer(model_path, "grpo_code", *knobs)
    groups = make_groups()
    trainer.step(groups, 0)
    before = weights_of(trainer)
    collected = spy_on_gradients(monkeypatch)
    result = trainer.step(equal_rewards(groups, every=1), 0)
    assert all(not g.any() for g in collected["policy"][0]) == is_silent
    assert result.scalars["policy/entropy"] > 0
    assert not equal(before, weights_of(trainer)), "the optimizer's moments go on"


@pytest.mark.covers("param_offload, optimizer_offload")
@pytest.mark.parametrize(("offload", "min_params"), [("optimizer", 0), ("parameters", 1000)])
def test_neither_offloading_nor_the_shard_units_change_what_is_trained(
    model_path: Path,
    process_group: None,
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
    min_params: int,
) -> None:
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


def test_leaving_the_device_between_steps_changes_nothing(
    model_path: Path, process_group: None
) -> None:
    weights, places = [], []
    resting = Resting()
    for leaves in (False, True):
        trainer = make_trainer(model_path, "ppo_code", "model.dtype=bfloat16")
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
        weights.append(weights_of(trainer))
    assert places[0] == places[1] == places[2], "the memory is used again"
    assert equal(*weights)


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
