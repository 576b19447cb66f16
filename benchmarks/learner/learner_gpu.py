"""Measure the model FLOPs utilisation of the update on a GPU.

Run: `python -m benchmarks.learner.learner_gpu [--rounds N] [--layers N]`.
The model has the shape of Qwen3-0.6B in bfloat16; it runs with and without packing, checkpointing
and offloaded moments. Utilisation = FLOPs per second that the model needs for the trained and the
prompt tokens, divided by the rate of a large bfloat16 product measured in the same run. The model
needs 6 FLOPs per parameter and token, plus attention; recomputation does not count. Without a GPU
the benchmark reports this and exits with 0.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.composition.compose import compose
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from benchmarks.figures import figure
from benchmarks.learner.learner import make_groups, mixed_lengths

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
VOCABULARY = 151_936
PROMPT_TOKENS = 128
MEAN_TOKENS = 512
NUM_SEQUENCES = 64


def random_model(directory: Path, layers: int) -> Path:
    """Save a model with the shape of Qwen3-0.6B and random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPE,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def product_flops(device: torch.device) -> float:
    """Return the FLOPs per second of a product of two 8192 x 8192 matrices in bfloat16."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for round_number in range(25):
        if round_number == 5:
            torch.cuda.synchronize()
            started_s = time.perf_counter()
        torch.mm(a, b)
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - started_s)


def needed_flops(groups: Sequence[Group], layers: int) -> float:
    """Return the FLOPs that one step needs.

    6 per parameter and token (parameters of the vocabulary only where a token is predicted), and
    12 x width per layer and pair of attending tokens.
    """
    width = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    kv_width = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    per_layer = SHAPE["hidden_size"] * (2 * width + 2 * kv_width + 3 * SHAPE["intermediate_size"])
    lengths = [len(t.token_ids) for g in groups for t in g.trajectories]
    trained = sum(t.response_length for g in groups for t in g.trajectories)
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return (
        6 * (layers * per_layer * sum(lengths) + SHAPE["hidden_size"] * VOCABULARY * trained)
        + 12 * layers * width * pairs
    )


def step_s(
    model_path: Path,
    groups: Sequence[Group],
    *,
    budget_tokens: int,
    checkpointing: bool,
    rounds: int,
    offload: str = "none",
) -> tuple[float, float]:
    """Return the median seconds of a step of the Trainer, and its peak memory in GB."""
    knobs = [
        "model.dtype=bfloat16",
        "data.max_prompt_tokens=1",
        "data.max_response_tokens=1",
        f"learner.budget_tokens={budget_tokens}",
        f"learner.gradient_checkpointing={checkpointing}",
        "learner.gpus_each=1",
        f"learner.offload={offload}",
    ]
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda", 0)
    trainer = Trainer(
        compose("grpo_code", knobs),
        model_path,
        rank=0,
        world_size=1,
        device=device,
        failed_batches=model_path,
    )
    times_s = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        trainer.step(groups, 0)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[2:]), torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    """Measure all variants and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU is available: nothing was measured")
        return
    disable_progress_bar()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 697, PROMPT_TOKENS).tolist() for _ in range(NUM_SEQUENCES)]
    groups = make_groups(prompts, mixed_lengths(NUM_SEQUENCES, MEAN_TOKENS))
    rate = product_flops(torch.device("cuda", 0))
    figure("large bfloat16 product", rate / 1e12, "TFLOP/s")
    needed = needed_flops(groups, arguments.layers)
    with tempfile.TemporaryDirectory() as scratch:
        model_path = random_model(Path(scratch), arguments.layers)
        for is_packed in (True, False):
            for checkpointing in (False, True):
                budget_tokens = 16_384 if is_packed else 2
                seconds, peak_gb = step_s(
                    model_path,
                    groups,
                    budget_tokens=budget_tokens,
                    checkpointing=checkpointing,
                    rounds=arguments.rounds,
                )
                name = "packed" if is_packed else "one sequence at a time"
                if checkpointing:
                    name += ", checkpointing"
                goal = ">= 0.45" if is_packed and not checkpointing else ""
                figure(
                    f"{name}: share of the product's rate", needed / seconds / rate, "", goal=goal
                )
                figure(f"{name}: peak memory", peak_gb, "GB")
        times_s = {}
        for offload in ("none", "optimizer"):
            times_s[offload], peak_gb = step_s(
                model_path,
                groups,
                budget_tokens=16_384,
                checkpointing=True,
                rounds=arguments.rounds,
                offload=offload,
            )
            figure(f"learner.offload={offload}: peak memory", peak_gb, "GB")
        ratio = times_s["optimizer"] / times_s["none"]
        figure("offloaded moments: time of a step over that without", ratio, "")


if __name__ == "__main__":
    main()
