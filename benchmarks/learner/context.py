"""Measure the memory of one long sequence on one rank, and on ranks that share it.

Each rank is a process with a float32 model of random weights, and only the activations differ:
the figure is the peak of its resident memory above that before the pass (forward and backward, with
recomputed activations). Ranks share the machine's cores, so the times say little.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.context [--tokens N] [--ranks 1 2 4]`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.batching.packing import pack_rows
from async_rl.learner.context import divide_ranks
from async_rl.learner.loading import load_policy
from async_rl.learner.sharding import join
from benchmarks.figures import figure
from benchmarks.learner.learner import status_mb

CPU = torch.device("cpu")
_WAIT_S = 600.0


def measure(rank: int, ranks: int, tokens: int, directory: str, result: Connection) -> None:
    """Run one pass on a rank, and send its MB and seconds."""
    if ranks > 1:
        store = dist.FileStore(f"{directory}/ranks{ranks}", ranks)  # type: ignore[attr-defined]
        join(store, rank, ranks, host="127.0.0.1", device=CPU, timeout_s=_WAIT_S)
    context, _ = divide_ranks(ranks, ranks, CPU)
    policy = load_policy(Path(directory) / "model", trust_remote_code=False)
    policy.context = context
    policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    for size in (64, tokens):
        # The first pass is short: it allocates the gradients of all weights.
        row = np.random.default_rng(0).integers(0, 50, size).astype(np.int32)
        packed = pack_rows([row], prompt_length=16, device=CPU)
        before_mb, started_s = status_mb("VmRSS"), time.perf_counter()
        output = policy(packed, temperature=1.0, chunk_tokens=1024)
        output.logprobs.sum().backward()
    result.send((status_mb("VmHWM") - before_mb, time.perf_counter() - started_s))


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        shape = Qwen3Config(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=512,
            max_position_embeddings=arguments.tokens,
        )
        Qwen3ForCausalLM(shape).save_pretrained(Path(directory) / "model")
        for ranks in arguments.ranks:
            pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
            children = [
                context.Process(
                    target=measure, args=(rank, ranks, arguments.tokens, directory, pipe[1])
                )
                for rank, pipe in enumerate(pipes)
            ]
            for child in children:
                child.start()
            measured = [pipe[0].recv() for pipe in pipes]
            for child in children:
                child.join()
            name = f"one sequence of {arguments.tokens} tokens on {ranks} ranks"
            figure(f"{name}: largest peak of a rank", max(mb for mb, _ in measured), "MB")
            figure(f"{name}: forward and backward", max(s for _, s in measured), "s")


if __name__ == "__main__":
    main()
