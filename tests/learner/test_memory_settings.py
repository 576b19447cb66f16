"""The settings that trade memory for time do what they say; that they change no gradient is shown
in test_gradients.py and test_sharding.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import (
    make_groups,
    make_trainer,
    offloading_trainer,
    policy_of,
)
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from async_rl.config import learner
from async_rl.core.errors import ConfigError
from async_rl.learner import sharding


@pytest.mark.proves("learner.budget_tokens")
def test_a_smaller_token_budget_makes_more_backward_passes(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    backward = Tensor.backward

    def counted(self: Tensor) -> None:
        counts[-1] += 1
        backward(self)

    monkeypatch.setattr(Tensor, "backward", counted)
    for budget in (8192, 24):
        counts.append(0)
        trainer = make_trainer(model_path, "grpo_code", f"learner.budget_tokens={budget}")
        trainer.step(make_groups(), 0)
    assert counts[1] > counts[0] > 0


@pytest.mark.proves("learner.forward_budget_tokens")
def test_passes_without_a_gradient_have_a_budget_of_their_own(model_path: Path) -> None:
    def sizes(budget: str) -> dict[bool, list[int]]:
        """Tokens of the policy's passes, with and without a gradient."""
        knobs = ["learner.budget_tokens=24", f"learner.forward_budget_tokens={budget}"]
        trainer = make_trainer(model_path, "ppo_code", *knobs)
        seen: dict[bool, list[int]] = {True: [], False: []}

        def counted(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if isinstance(module, nn.Embedding):
                seen[torch.is_grad_enabled()].append(inputs[0].shape[-1])

        hook = nn.modules.module.register_module_forward_pre_hook(counted)
        try:
            trainer.step(make_groups(), 0)
        finally:
            hook.remove()
        return seen

    same, large = sizes("null"), sizes("70")
    assert max(same[False]) <= 24 < max(large[False]) <= 70
    assert len(large[False]) < len(same[False])
    assert large[True] == same[True]


@pytest.mark.proves("learner.gradient_checkpointing")
def test_with_gradient_checkpointing_each_layer_runs_forward_again(model_path: Path) -> None:
    def num_forwards(checkpointing: str) -> int:
        trainer = make_trainer(
            model_path, "grpo_code", f"learner.gradient_checkpointing={checkpointing}"
        )
        count = 0

        def counted(module: nn.Module, *_: object) -> None:
            nonlocal count
            is_layer = type(module).__name__ == "Qwen3DecoderLayer"
            if is_layer and torch.is_grad_enabled():
                count += 1

        hook = nn.modules.module.register_module_forward_pre_hook(counted)
        try:
            trainer.step(make_groups(), 0)
        finally:
            hook.remove()
        return count

    assert num_forwards("true") == 2 * num_forwards("false") > 0


class LargestLogits(TorchDispatchMode):
    """Records the most elements of a matrix product whose last dimension is the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        if is_product and result.shape[-1] == self._vocab_size:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_a_smaller_chunk_bounds_the_logits_that_exist_together(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size = AutoConfig.from_pretrained(model_path).vocab_size

    def largest() -> int:
        trainer = make_trainer(model_path, "grpo_code")
        token_ids = [t.token_ids for g in make_groups() for t in g.trajectories]
        with LargestLogits(vocab_size) as logits:
            trainer.logprobs(token_ids)
        return logits.num_elements

    large = largest()
    monkeypatch.setattr(learner, "CPU_LOGITS_MB", 0.0006)
    small = largest()
    assert 0 < small < large
    assert 4 * small <= 0.0006 * 2**20, "bytes of float32"


@pytest.mark.proves("learner.shard_units")
def test_the_least_size_of_a_unit_decides_what_is_sharded_alone(
    model_path: Path, process_group: None
) -> None:
    def units(chosen: int | str) -> list[str]:
        trainer = offloading_trainer(
            model_path, "grpo_code", f"learner.shard_units={chosen}", offload="parameters"
        )
        modules = policy_of(trainer).modules()
        return [type(m).__name__.removeprefix("FSDP") for m in modules if isinstance(m, FSDPModule)]

    assert units(0).count("Qwen3DecoderLayer") == 2
    assert units(10**9).count("Qwen3DecoderLayer") == 0
    named = units("[Qwen3MLP]")
    assert (named.count("Qwen3MLP"), named.count("Qwen3DecoderLayer")) == (2, 0)
    with pytest.raises(ConfigError, match=r"no module of the class Qwen9MLP; it has .*Qwen3MLP"):
        units("[Qwen9MLP]")


@pytest.mark.proves("learner.offload")
def test_offloaded_parameters_are_sharded_with_a_policy_that_keeps_them_on_the_host(
    model_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = []
    real = sharding.fully_shard

    def spy(module: nn.Module, **options: Any) -> Any:
        policies.append(options["offload_policy"])
        return real(module, **options)

    monkeypatch.setattr(sharding, "fully_shard", spy)
    offloading_trainer(model_path, "grpo_code", offload="parameters")
    assert policies
    assert all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
