"""The settings that trade memory for time do what they say; that they change no gradient is shown
in test_gradients.py and test_sharding.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import make_groups, make_trainer, offloading_trainer, policy_of
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from async_rl.config import learner
from async_rl.core.errors import ConfigError
from async_rl.learner import models, sharding


@pytest.mark.proves("learner.budget_tokens", "learner.forward_budget_tokens")
def test_passes_with_and_without_a_gradient_have_their_budgets(model_path: Path) -> None:
    def sizes(budget: int, forward: str) -> dict[bool, list[int]]:
        """Tokens of the policy's passes, with and without a gradient."""
        knobs = [f"learner.budget_tokens={budget}", f"learner.forward_budget_tokens={forward}"]
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

    whole, same, large = sizes(8192, "null"), sizes(24, "null"), sizes(24, "70")
    assert len(whole[True]) < len(same[True])
    assert max(same[True]) <= 24 < max(whole[True])
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


def test_the_memory_of_logits_bounds_the_rows_of_a_chunk(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = []
    real = models.token_logprobs

    def spy(*given: Any, chunk_tokens: int, **named: Any) -> Any:
        chunks.append(chunk_tokens)
        return real(*given, chunk_tokens=chunk_tokens, **named)

    monkeypatch.setattr(learner, "CPU_LOGITS_MB", 0.0006)
    trainer = make_trainer(model_path, "grpo_code")
    # Loading compares rows of its own.
    monkeypatch.setattr(models, "token_logprobs", spy)
    trainer.step(make_groups(), 0)
    # 629 bytes, and 50 float32 for each row.
    assert {*chunks} == {3}


@pytest.mark.proves("learner.shard_units")
@pytest.mark.covers("wrap_policy, min_num_params")
def test_the_least_size_of_a_unit_decides_what_is_sharded_alone(
    model_path: Path, process_group: None
) -> None:
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
