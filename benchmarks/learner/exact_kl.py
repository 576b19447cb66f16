"""Measure what the exact KL to the reference costs a learner step, next to an estimate by tokens.

Both learners make the same step; one needs only the reference's log-probs of the sampled tokens, as
an estimate of the KL would. They take turns, and CPU seconds are compared, because other work on
the machine affects them less than wall-clock seconds. Shapes: the embedded model with conf=ppo_code
(policy, critic and reference, 697 tokens of vocabulary), and that of SmolLM2-135M with
conf=grpo_code and algorithm.kl=loss (49,152 tokens).

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.exact_kl [--rounds N] [--shape embedded]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.algorithms.logprobs import token_logprobs
from async_rl.learner import models
from async_rl.learner.sharding import ensure_group_of_one
from benchmarks.figures import figure
from benchmarks.learner.learner import framework_step, make_groups, random_model


def of_tokens(
    hidden: Tensor, *, head: Tensor, reference: tuple[Tensor, Tensor] | None, **limits: Any
) -> tuple[Tensor | None, ...]:
    """Stand in for `token_logprobs`: of the reference the log-probs alone."""
    own = token_logprobs(hidden, head=head, **limits)
    if reference is None:
        return own
    with torch.no_grad():
        ref_logprobs, *_ = token_logprobs(reference[0], head=reference[1], **limits)
    return *own[:2], torch.zeros_like(ref_logprobs), ref_logprobs


def smollm(directory: Path) -> Path:
    """Save a random model with the shape of SmolLM2-135M."""
    shape = Qwen3Config(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49_152,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    return directory


CASES = {
    "embedded": (random_model, "ppo_code", [], 128),
    "SmolLM2-135M": (smollm, "grpo_code", ["algorithm.kl=loss", "buffer.groups_per_step=2"], 16),
}


def main() -> None:
    """Print the cost of each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=CASES, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    ensure_group_of_one(torch.device("cpu"))
    rng = np.random.default_rng(0)
    for shape in arguments.shape or CASES:
        make, conf, settings, count = CASES[shape]
        prompts = [
            ids for _ in range(count // 8) for ids in [rng.integers(0, 600, 24).tolist()] * 8
        ]
        groups = make_groups(prompts, rng.integers(16, 41, count).tolist())
        with tempfile.TemporaryDirectory() as scratch:
            step = framework_step(conf, settings, make(Path(scratch)), groups)
        ratios, seconds = [], []
        for _ in range(arguments.rounds + 1):
            spent_s = []
            for function in (token_logprobs, of_tokens):
                setattr(models, "token_logprobs", function)  # noqa: B010
                began_s = time.process_time()
                step()
                spent_s.append(time.process_time() - began_s)
            ratios.append(spent_s[0] / spent_s[1] - 1)
            seconds.append(spent_s[1])
        # The first pair allocates.
        ratios, seconds = ratios[1:], seconds[1:]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        figure(f"{shape}: a step without it", statistics.mean(seconds), "CPU s")
        figure(f"{shape}: exact KL", 100 * statistics.mean(ratios), f"% +- {100 * error:.1f}")


if __name__ == "__main__":
    main()
