"""The planned GPU memory of a learner rank is that of the real learner, to 10 percent.

`benchmarks/learner/memory_plan.py` runs the learner's code on tensors without storage. Models here
have the widths of real ones and few layers, which keeps the test fast; the benchmark has all
layers.
"""

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
    ("conf", "size", "ranks"),
    [("ppo_code", "0.6B", 8), ("grpo_code", "8B", 4), ("grpo_code", "1.7B", 1)],
)
def test_the_plan_is_within_a_tenth_of_the_account(conf: str, size: str, ranks: int) -> None:
    hf = QWEN3 | SIZES[size] | {"num_hidden_layers": 2, "num_key_value_heads": 8}
    hf["tie_word_embeddings"] = size != "8B"
    knobs = ["learner.gradient_checkpointing=false"]
    config = settings_of(conf, ranks=ranks, overrides=knobs)
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
