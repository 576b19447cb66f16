"""Compare the learner with a bare loop, and the memory of log-probs with materialised logits.

The bare loop is a step without a framework: the same model under FSDP2 on one rank, all rows padded
to the longest (of the batch, or of eight rows), the attention of the model, log_softmax, clipping,
AdamW; no diagnostics, no critic, no reference (ppo_code has both). Both run in one process in
alternating phases.

Batches: responses of log-normal length, the longest 8 times the mean; responses of equal length;
and responses of the embedded task. In the first two a prompt has one token, so that nothing is
shared, and every group has both rewards, so the learner cannot skip any work. CPU seconds are
compared, because other work on the machine affects them less than wall-clock seconds.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.learner [--rounds N] [--batch mix] [OVERRIDE
...]`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.algorithms.logprobs import token_logprobs
from async_rl.composition.compose import compose
from async_rl.composition.overrides import with_defaults
from async_rl.core.types import Group, Purpose, Score, Trajectory
from async_rl.learner.sharding import ensure_group_of_one
from async_rl.learner.trainer import Trainer
from benchmarks.figures import figure

VOCABULARY = 697
GROUP_SIZE = 8
MEMORY_TOKENS = 8192
HIDDEN = 64


def random_model(directory: Path, vocabulary: int = VOCABULARY) -> Path:
    """Save a random Qwen3 with the shape of the embedded model: 1.1M parameters."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    }
    config = Qwen3Config(
        **shape,
        head_dim=32,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_groups(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], seed: int = 0
) -> list[Group]:
    """Return groups; sequence i has prompts[i] and a random response of lengths[i] tokens.

    Rewards alternate.
    """
    rng = np.random.default_rng(seed)

    def trajectory(i: int) -> Trajectory:
        ids = np.concatenate([prompts[i], rng.integers(0, VOCABULARY, lengths[i])]).astype(np.int32)
        is_response = np.arange(len(ids)) >= len(prompts[i])
        return Trajectory(
            token_ids=ids,
            prompt_length=len(prompts[i]),
            loss_mask=is_response,
            behavior_logprobs=np.where(is_response, -np.log(VOCABULARY), 0).astype(np.float32),
            versions=np.where(is_response, 0, -1).astype(np.int32),
            is_truncated=False,
            score=Score(reward=float(i % 2), parts={}, verdicts=(), latency_s=0.0),
        )

    def group(index: int) -> Group:
        return Group(
            group_id=index,
            attempt=1,
            prompt_id=str(index),
            purpose=Purpose.TRAIN,
            data_source="benchmark",
            generator="",
            admitted_version=0,
            trajectories=[trajectory(index * GROUP_SIZE + i) for i in range(GROUP_SIZE)],
            generation_s=0.0,
        )

    return [group(i) for i in range(len(lengths) // GROUP_SIZE)]


def mixed_lengths(count: int, mean: int) -> list[int]:
    """Return log-normal lengths whose maximum is 8 times the mean."""
    lengths = np.sort(np.random.default_rng(0).lognormal(0, 1, count))
    lengths[-1] = 8 * lengths[:-1].sum() / (count - 8)
    return np.maximum(1, lengths * mean / lengths.mean()).round().astype(int).tolist()


def batches() -> dict[str, list[Group]]:
    """Return the batches of the comparison by name."""
    rng = np.random.default_rng(1)

    def prompts(count: int, least: int, most: int) -> list[list[int]]:
        return [
            ids
            for _ in range(count // GROUP_SIZE)
            for ids in [rng.integers(0, VOCABULARY, rng.integers(least, most + 1)).tolist()]
            * GROUP_SIZE
        ]

    return {
        "mix": make_groups(prompts(64, 1, 1), mixed_lengths(64, 64)),
        "equal": make_groups(prompts(64, 1, 1), [112] * 64),
        "embedded": make_groups(prompts(128, 16, 24), rng.integers(20, 46, 128).tolist()),
    }


def bare_loop(model_path: Path, groups: Sequence[Group], *, rows_each: int) -> Callable[[], None]:
    """Return one GRPO step without a framework.

    Its micro-batches have rows_each sequences, padded to the longest of them.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows = [t for g in groups for t in g.trajectories]
    total = sum(t.response_length for t in rows)
    parts = []
    for start in range(0, len(rows), rows_each):
        part = rows[start : start + rows_each]
        ids = torch.zeros(len(part), max(len(t.token_ids) for t in part), dtype=torch.int64)
        mask = torch.zeros(ids.shape)
        for i, t in enumerate(part):
            ids[i, : len(t.token_ids)] = torch.from_numpy(t.token_ids)
            mask[i, t.prompt_length : len(t.token_ids)] = 1
        parts.append((ids, mask, torch.randn(len(part), 1)))

    def step() -> None:
        for ids, mask, advantages in parts:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -(ratio * advantages * mask[:, 1:]).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def framework_step(
    conf: str, overrides: Sequence[str], model_path: Path, groups: Sequence[Group]
) -> Callable[[], None]:
    """Return one step of the Trainer."""
    config = compose(conf, with_defaults(overrides, ["learner.optimizer.lr=1e-5"]))
    trainer = Trainer(config, model_path, rank=0, world_size=1, device=torch.device("cpu"))

    def step() -> None:
        trainer.step(groups, 0)

    return step


def compare(
    name: str,
    phases: dict[str, Callable[[], None]],
    groups: Sequence[Group],
    *,
    rounds: int,
    goal: str,
) -> None:
    """Print the CPU seconds of every phase, and the speed of others relative to the bare loop."""
    cpu_s: dict[str, list[float]] = {phase: [] for phase in phases}
    for round_number in range(rounds + 1):
        for phase, step in phases.items():
            started_s = time.process_time()
            step()
            if round_number:
                cpu_s[phase].append(time.process_time() - started_s)
    lengths = [t.response_length for g in groups for t in g.trajectories]
    print(
        f"{name}: {len(lengths)} responses, mean {np.mean(lengths):.0f} and at most {max(lengths)}"
        " tokens"
    )
    for phase, values in cpu_s.items():
        spent_s = statistics.median(values)
        print(
            f"  {phase:10} {spent_s:7.3f} CPU s per step (best {min(values):.3f}),"
            f" {sum(lengths) / spent_s:7.0f} tokens/s"
        )
        for bare in phases.keys() & {"bare", "bare in 8s"} if not phase.startswith("bare") else ():
            ratio = statistics.median(cpu_s[bare]) / spent_s
            figure(
                f"{name}: {phase} against {bare}",
                ratio,
                "x its tokens/s",
                goal="" if phase == "ppo_code" else goal,
            )


def peak_mb(kind: str, vocabulary: int) -> float:
    """Return the peak memory in MB of log-probs of 8192 tokens, forward and backward.

    The memory of their inputs and gradients is subtracted.

    kind: "ours", or "logits" for log_softmax over the whole matrix.
    """
    hidden = torch.randn(MEMORY_TOKENS, HIDDEN, requires_grad=True)
    head = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)
    targets = torch.randint(0, vocabulary, (MEMORY_TOKENS,))
    (torch.randn(64, 64) @ torch.randn(64, 64)).sum()
    chunk_mb = compose("grpo_code", []).learner.logits_chunk_mb
    chunk_tokens = int(chunk_mb * 2**20 / (4 * vocabulary))
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before_mb = status_mb("VmRSS")
    if kind == "logits":
        logprobs = torch.log_softmax(hidden @ head.t(), -1).gather(1, targets[:, None]).squeeze(1)
    else:
        logprobs, *_ = token_logprobs(
            hidden, head=head, targets=targets, temperature=1.0, chunk_tokens=chunk_tokens
        )
    logprobs.sum().backward()
    return status_mb("VmHWM") - before_mb


def status_mb(name: str) -> float:
    """Return one entry of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def memory() -> None:
    """Measure the memory of log-probs, each case in a separate process.

    Materialised logits are measured if they fit into memory, and calculated otherwise.
    """
    for vocabulary in (32_000, 150_000):
        command = [
            sys.executable,
            "-m",
            "benchmarks.learner.learner",
            "--peak",
            "ours",
            "--vocabulary",
            str(vocabulary),
        ]
        ours = float(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
        )
        one_matrix = MEMORY_TOKENS * vocabulary * 4 / 2**20
        figure(f"log-probs at V={vocabulary}: peak above inputs", ours, "MB")
        figure(
            f"log-probs at V={vocabulary}: share of one logits matrix ({one_matrix:.0f} MB)",
            ours / one_matrix,
            "",
            goal="<= 0.125",
        )
        if vocabulary == 32_000:
            command[4] = "logits"
            whole = float(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[
                    -1
                ]
            )
            figure(
                f"log-probs at V={vocabulary}: share of log_softmax's peak ({whole:.0f} MB)",
                ours / whole,
                "",
                goal="<= 0.125",
            )


def main() -> None:
    """Measure all batches and the memory, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", action="append", choices=["mix", "equal", "embedded", "none"])
    parser.add_argument(
        "--peak", choices=["ours", "logits"], help="run only this memory measurement"
    )
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if arguments.peak:
        print(peak_mb(arguments.peak, arguments.vocabulary))
        return
    ensure_group_of_one(torch.device("cpu"))
    goals = {"mix": ">= 1.5", "equal": ">= 0.95 (1.05x the time)", "embedded": ""}
    with tempfile.TemporaryDirectory() as scratch:
        model_path = random_model(Path(scratch))
        for name, groups in batches().items():
            if arguments.batch and name not in arguments.batch:
                continue
            phases = {"bare": bare_loop(model_path, groups, rows_each=len(groups) * GROUP_SIZE)}
            if name == "mix":
                phases["bare in 8s"] = bare_loop(model_path, groups, rows_each=8)
            for conf in ("grpo_code", "ppo_code") if name == "embedded" else ("grpo_code",):
                phases[conf] = framework_step(conf, arguments.overrides, model_path, groups)
            compare(name, phases, groups, rounds=arguments.rounds, goal=goals[name])
    dist.destroy_process_group()
    if not arguments.batch:
        memory()


if __name__ == "__main__":
    main()
