"""Seconds per learner step on one core, and the same batch through a bare padded loop, phases alternating.

CPU seconds are printed beside wall-clock ones, because they hold on a machine that does other things too; the ratio is theirs.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner [--model DIR] [--rounds N] [--conf grpo_code --conf ppo_code]`.
The batch has the embedded task's shape: 16 groups of 8, prompts of 20-30 and responses of 20-45 tokens.
The bare loop is what one writes without a framework: right-padded rows, the model's own attention, log_softmax, AdamW; no diagnostics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.launchers.compose import compose
from async_rl.learner.trainer import Trainer
from async_rl.types import Group, Purpose, Score, Trajectory


def random_model(directory: Path) -> Path:
    """A Qwen3 of 0.88M parameters, as wide as the embedded model."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen3Config(**shape, head_dim=32, vocab_size=200, tie_word_embeddings=True, max_position_embeddings=512)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_groups(vocabulary: int, *, num_groups: int = 16, size: int = 8, seed: int = 0) -> list[Group]:
    """Random tokens in the lengths of the embedded task."""
    rng = np.random.default_rng(seed)

    def trajectory(prompt: np.ndarray) -> Trajectory:
        ids = np.concatenate([prompt, rng.integers(0, vocabulary, rng.integers(20, 46))]).astype(np.int32)
        is_response = np.arange(len(ids)) >= len(prompt)
        return Trajectory(
            token_ids=ids,
            prompt_length=len(prompt),
            loss_mask=is_response,
            behavior_logprobs=np.where(is_response, -np.log(vocabulary), 0).astype(np.float32),
            versions=np.where(is_response, 0, -1).astype(np.int32),
            is_truncated=False,
            score=Score(reward=float(rng.integers(0, 2)), parts={}, verdicts=(), latency_s=0.0),
        )

    def group(index: int) -> Group:
        prompt = rng.integers(0, vocabulary, rng.integers(20, 31))
        return Group(
            group_id=index,
            attempt=1,
            prompt_id=str(index),
            purpose=Purpose.TRAIN,
            data_source="benchmark",
            generator="",
            admitted_version=0,
            trajectories=[trajectory(prompt) for _ in range(size)],
            generation_s=0.0,
        )

    return [group(i) for i in range(num_groups)]


def bare_loop(model_path: Path, groups: Sequence[Group]) -> Callable[[], None]:
    """One GRPO step without a framework."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows = [t for g in groups for t in g.trajectories]
    longest = max(len(t.token_ids) for t in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest)
    for i, t in enumerate(rows):
        ids[i, : len(t.token_ids)] = torch.from_numpy(t.token_ids)
        mask[i, t.prompt_length : len(t.token_ids)] = 1
    advantages = torch.randn(len(rows), 1)

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * advantages * mask[:, 1:]).sum() / mask[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def framework_step(conf: str, overrides: Sequence[str], model_path: Path, groups: Sequence[Group]) -> Callable[[], None]:
    """One step of the Trainer."""
    config = compose(conf, ["learner.optimizer.lr=1e-5", *overrides])
    trainer = Trainer(config, model_path, rank=0, world_size=1, device=torch.device("cpu"), failed_batches=model_path / "failed_batches")

    def step() -> None:
        trainer.step(groups, 0)

    return step


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conf", action="append")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        model_path = arguments.model or random_model(Path(scratch))
        groups = make_groups(AutoConfig.from_pretrained(model_path).vocab_size)
        phases = {"bare padded loop": bare_loop(model_path, groups)}
        for conf in arguments.conf or ["grpo_code", "ppo_code"]:
            phases[conf] = framework_step(conf, arguments.overrides, model_path, groups)
        seconds: dict[str, list[float]] = {name: [] for name in phases}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in phases}
        for round_number in range(arguments.rounds + 1):
            for name, step in phases.items():
                started_s, cpu_started_s = time.perf_counter(), time.process_time()
                step()
                if round_number:
                    seconds[name].append(time.perf_counter() - started_s)
                    cpu_seconds[name].append(time.process_time() - cpu_started_s)
    tokens = sum(t.response_length for g in groups for t in g.trajectories)
    bare_s = statistics.median(cpu_seconds["bare padded loop"])
    print(f"{tokens} trained tokens per step, {torch.get_num_threads()} thread")
    for name, values in seconds.items():
        cpu_s = statistics.median(cpu_seconds[name])
        print(
            f"{name:18} {statistics.median(values):7.3f} s/step, CPU {cpu_s:6.3f} s (best {min(cpu_seconds[name]):.3f}), "
            f"{tokens / cpu_s:6.0f} tokens/CPU s, {bare_s / cpu_s:5.2f}x bare"
        )


if __name__ == "__main__":
    main()
