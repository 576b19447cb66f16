"""The planned GPU memory of a learner rank is that of the real learner, to 10 percent.

`benchmarks/learner/memory_plan.py` runs the learner's code on tensors without storage. Models here
have the widths of real ones and few layers, which keeps the test fast; the benchmark has all
layers.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.learner.memory_plan import QWEN3, accounted_bytes, planned_bytes, settings_of

SIZES = {
    "0.6B": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 6144},
    "8B": {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288},
}


SMALL = QWEN3 | SIZES["0.6B"] | {"num_hidden_layers": 2, "num_key_value_heads": 8}


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """End the group of one rank that a test of the learner left in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("conf", "size", "ranks", "checkpointing"),
    [
        ("ppo_code", "0.6B", 8, "false"),
        ("grpo_code", "8B", 4, "false"),
        ("grpo_code", "1.7B", 1, "false"),
    ],
)
def test_the_plan_is_within_a_tenth_of_the_account(
    conf: str, size: str, ranks: int, checkpointing: str
) -> None:
    hf = QWEN3 | SIZES[size] | {"num_hidden_layers": 2, "num_key_value_heads": 8}
    hf["tie_word_embeddings"] = size != "8B"
    config = settings_of(
        conf, ranks=ranks, overrides=[f"learner.gradient_checkpointing={checkpointing}"]
    )
    accounted = accounted_bytes(hf, config)["Total"]
    assert abs(planned_bytes(hf, config) / accounted - 1) < 0.1


def test_the_plan_of_an_adapter_is_within_a_tenth_of_the_account() -> None:
    knobs = ["model.lora=lora", "algorithm.kl=loss", "learner.gradient_checkpointing=false"]
    config = settings_of("grpo_code", ranks=8, overrides=knobs)
    accounted = accounted_bytes(SMALL, config)["Total"]
    assert abs(planned_bytes(SMALL, config) / accounted - 1) < 0.1


def test_the_account_sees_the_keys_of_shared_prompts() -> None:
    short = ["data.max_response_tokens=512"]
    config = settings_of("grpo_code", ranks=2, overrides=short)
    accounted = accounted_bytes(SMALL, config)["Total"]
    assert -0.1 < planned_bytes(SMALL, config) / accounted - 1 < 0.2


def test_long_passes_without_a_gradient_are_planned() -> None:
    # Log-probs are computed in chunks of logits: fewer with a small vocabulary.
    hf = SMALL | {"vocab_size": 16_000}
    knobs = ["learner.gradient_checkpointing=true", "learner.budget_tokens=4096"]
    shorter, longer = (
        settings_of(
            "ppo_code", ranks=8, overrides=[*knobs, f"learner.forward_budget_tokens={tokens}"]
        )
        for tokens in ("null", "262144")
    )
    planned = planned_bytes(hf, longer)
    assert planned > 1.9 * planned_bytes(hf, shorter), "the long pass is the largest moment"
    accounted = accounted_bytes(hf, longer)["Total"]
    assert abs(planned / accounted - 1) < 0.1
