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
    "8B": {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288},
}


NO_CHECKPOINTS = ["learner.gradient_checkpointing=false"]


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """End the group of one rank that a test of the learner left in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("conf", "size", "ranks", "settings"),
    [
        ("ppo_code", "0.6B", 8, NO_CHECKPOINTS),
        ("grpo_code", "8B", 4, NO_CHECKPOINTS),
        ("grpo_code", "0.6B", 8, ["model.lora=lora", "algorithm.kl=loss", *NO_CHECKPOINTS]),
        ("grpo_code", "0.6B", 2, ["data.max_response_tokens=512"]),
    ],
    ids=["a critic", "own embeddings", "an adapter", "keys of shared prompts"],
)
def test_the_plan_is_within_a_tenth_of_the_account(
    conf: str, size: str, ranks: int, settings: list[str]
) -> None:
    hf = QWEN3 | SIZES[size] | {"num_hidden_layers": 2, "num_key_value_heads": 8}
    hf["tie_word_embeddings"] = size != "8B"
    config = settings_of(conf, ranks=ranks, overrides=settings)
    accounted = accounted_bytes(hf, config)["Total"]
    most = 0.2 if "data.max_response_tokens=512" in settings else 0.1
    assert -0.1 < planned_bytes(hf, config) / accounted - 1 < most
