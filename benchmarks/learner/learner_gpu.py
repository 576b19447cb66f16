"""Measure the learner on a GPU: eager and compiled, for three sizes of models.

Run: `python -m benchmarks.learner.learner_gpu [--out FILE] [--only NAME ...] [--tiny]`.
Each model and variant runs in its own process with a limit. One result is a step of the Trainer in
bfloat16: its time, its model FLOPs utilisation (the FLOPs that the model needs for each trained and
prompt token, recomputation not counted, over the rate of a large bfloat16 product), its peak
memory, the kernels of a layer, and the time by kind of kernel. `gradients` compares the gradients
and log-probs of one batch. --tiny runs everything with small models, on any machine.

Variants: eager = no compiled block, and the head by rows; blocks = compiled blocks; head = the
fused head; compiled = both, as the product runs; outside = compiled, with attention outside of the
graph; offloaded = compiled, with the moments in host memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.algorithms import logprobs
from async_rl.composition.compose import compose
from async_rl.core.types import Group
from async_rl.learner import attention, loading, models
from async_rl.learner.optimizer import Applied, ModelOptimizer
from async_rl.learner.sharding import full_tensor
from async_rl.learner.trainer import Trainer
from benchmarks.learner.learner import make_groups, mixed_lengths

VOCABULARY = 151_936
PROMPT_TOKENS, MEAN_TOKENS, NUM_SEQUENCES, GROUP = 128, 512, 64, 8
WARM_UP, ROUNDS = 2, 3
LIMIT_S, TOTAL_S = 75.0, 175.0
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv"),
    "copies": ("memcpy", "memset", "nccl"),
    "fused": ("triton",),
}


class Shape(NamedTuple):
    """A Qwen3 model; its widths are those of the named size."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    is_tied: bool
    budget_tokens: int
    head_width: int = 128
    vocabulary: int = VOCABULARY


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8, True, 16_384),
    "1.7b": Shape(2048, 6144, 28, 16, 8, True, 8_192),
    "8b": Shape(4096, 12_288, 6, 32, 8, False, 8_192),
}
TINY = Shape(64, 128, 2, 4, 2, True, 2_048, head_width=16, vocabulary=700)


def write_model(directory: Path, shape: Shape) -> None:
    """Save a random model in bfloat16, unless another process has."""
    if (directory / "config.json").exists():
        return
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(_device()):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def batch(shape: Shape) -> list[Group]:
    """Groups that share their prompts, with responses of mixed lengths."""
    rng = np.random.default_rng(0)
    mean = MEAN_TOKENS if shape.vocabulary == VOCABULARY else 24
    prompts = [rng.integers(0, 697, PROMPT_TOKENS).tolist() for _ in range(NUM_SEQUENCES // GROUP)]
    each = [prompt for prompt in prompts for _ in range(GROUP)]
    return make_groups(each, mixed_lengths(NUM_SEQUENCES, mean))


def needed_flops(groups: Sequence[Group], shape: Shape) -> float:
    """The FLOPs of one step: 6 per parameter and token (the head where a token is predicted), and
    12 x width per layer and pair of attending tokens; a prompt counts once, as it is computed.
    """
    width, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    per_layer = shape.hidden * (2 * width + 2 * kv_width + 3 * shape.inner)
    tokens, pairs, trained = 0, 0.0, 0
    for group in groups:
        prompt = group.trajectories[0].prompt_length
        tokens += prompt
        pairs += prompt * (prompt + 1) / 2
        for sample in group.trajectories:
            size = sample.response_length
            tokens, trained = tokens + size, trained + size
            pairs += size * prompt + size * (size + 1) / 2
    linear = shape.layers * per_layer * tokens + shape.hidden * shape.vocabulary * trained
    return 6 * linear + 12 * shape.layers * width * pairs


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ceilings() -> dict[str, float]:
    """The rates of a large bfloat16 product and of a copy, bytes read and written counted."""
    size = 8192 if torch.cuda.is_available() else 256
    a, b = (torch.randn(size, size, device=_device(), dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size * size * 16, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    seconds = []
    for work in (lambda: torch.mm(a, b), lambda: target.copy_(source)):
        for turn in range(25):
            if turn == 5:
                _wait()
                started_s = time.perf_counter()
            work()
        _wait()
        seconds.append((time.perf_counter() - started_s) / 20)
    return {
        "product_tflops": 2 * size**3 / seconds[0] / 1e12,
        "copy_tb_s": 2 * source.numel() / seconds[1] / 1e12,
    }


def _logprobs_by_rows(hidden: Any, **given: Any) -> Any:
    names = ("head", "targets", "temperature", "chunk_tokens", "edits")
    reference = given["reference"] or (None, None)
    return logprobs.logprobs_by_rows(hidden, *(given.get(name) for name in names), *reference)


def choose(variant: str) -> None:
    """Make this process run the learner as the variant does."""
    if variant in ("eager", "head"):
        loading.compile_blocks = lambda blocks: None
    if variant in ("eager", "blocks"):
        models.token_logprobs = _logprobs_by_rows  # type: ignore[attr-defined]
    if variant == "outside":
        whole = attention.VarlenPlan.attend
        attention.VarlenPlan.attend = torch.compiler.disable(whole)  # type: ignore[method-assign]


def trainer_of(
    path: Path, shape: Shape, *, dtype: str = "bfloat16", offload: str = "none"
) -> Trainer:
    """Return a Trainer of the model on this machine's device."""
    knobs = [
        f"model.dtype={dtype}",
        "data.max_prompt_tokens=1",
        "data.max_response_tokens=1",
        f"learner.budget_tokens={shape.budget_tokens}",
        "learner.optimizer.warmup_steps=0",
        f"learner.gpus_each={int(torch.cuda.is_available())}",
        f"learner.offload={offload}",
    ]
    config = compose("grpo_code", knobs)
    return Trainer(config, path, rank=0, world_size=1, device=_device())


def step(path: Path, shape: Shape, variant: str) -> dict[str, Any]:
    """Measure steps of the Trainer."""
    groups = batch(shape)
    found: dict[str, Any] = ceilings()
    started_s = time.perf_counter()
    trainer = trainer_of(path, shape, offload="optimizer" if variant == "offloaded" else "none")
    found["load_s"] = time.perf_counter() - started_s
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        _wait()
        started_s = time.perf_counter()
        trainer.step(groups, 0)
        _wait()
        seconds.append(time.perf_counter() - started_s)
    found["step_s"] = statistics.median(seconds[WARM_UP:])
    found["compile_s"] = sum(seconds[:WARM_UP]) - WARM_UP * found["step_s"]
    rate = needed_flops(groups, shape) / found["step_s"] / 1e12
    found["tflops"] = rate
    found["mfu"] = rate / found["product_tflops"]
    if torch.cuda.is_available():
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    # The events of the device alone: those of the CPU would take long to read.
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        trainer.step(groups, 0)
        _wait()
    return found | kernels(trace)


def kernels(trace: profile) -> dict[str, Any]:
    """Return the kernels of one layer, and the seconds by kind and of the longest kernels."""
    rows = [
        (event.time_range.start, event.name, event.time_range.elapsed_us() / 1e6)
        for event in trace.events()
        if event.device_type.name == "CUDA"
    ]
    rows.sort()
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for _, name, seconds in rows:
        lower = name.lower()
        kind = next(
            (kind for kind, words in KINDS.items() if any(w in lower for w in words)), "rest"
        )
        by_kind[kind] += seconds
        by_name[name[:110]] += seconds
    names = [name.lower() for _, name, _ in rows]
    found: dict[str, Any] = {
        "kernels": len(rows),
        "busy_s": sum(by_kind.values()),
        "seconds_by_kind": dict(by_kind),
        "longest": dict(by_name.most_common(25)),
    }
    for way, word in (("forward", "flash_fwd"), ("backward", "flash_bwd_dq_dk_dv_loop")):
        # One layer is between the attention of two layers; the head is between two passes.
        at = [i for i, name in enumerate(names) if word in name]
        gaps = [after - before for before, after in itertools.pairwise(at)]
        found[f"kernels_per_layer_{way}"] = statistics.median(gaps) if gaps else 0
    return found


def gradients(path: Path, shape: Shape) -> dict[str, float]:
    """Compare gradients and log-probs of one batch: compiled with eager, and both with float32."""
    taken: list[list[torch.Tensor]] = []

    def take(self: ModelOptimizer, loss: float, **_: float) -> Applied:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        taken.append([full_tensor(grad).detach().cpu().double() for grad in grads])
        self.discard()
        return Applied(1.0, 1.0)

    ModelOptimizer.apply = take  # type: ignore[method-assign]
    rows = [t.token_ids for g in batch(shape) for t in g.trajectories][:8]
    outputs = {}
    plain = (loading.compile_blocks, logprobs.token_logprobs)
    for name, variant, dtype in (
        ("compiled", "compiled", "bfloat16"),
        ("eager", "eager", "bfloat16"),
        ("float32", "eager", "float32"),
    ):
        loading.compile_blocks, models.token_logprobs = plain  # type: ignore[attr-defined]
        choose(variant)
        trainer = trainer_of(path, shape, dtype=dtype)
        trainer.step(batch(shape), 0)
        outputs[name] = (taken.pop(), np.concatenate(trainer.logprobs(rows)))
        del trainer
    found = {}
    for one, other in (("compiled", "eager"), ("compiled", "float32"), ("eager", "float32")):
        pairs = list(zip(outputs[one][0], outputs[other][0], strict=True))
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        whole = sum(float((a - b).square().sum()) for a, b in pairs)
        norm = sum(float(b.square().sum()) for _, b in pairs)
        found[f"gradient_{one}_{other}"] = (whole / norm) ** 0.5
        found[f"worst_parameter_{one}_{other}"] = worst
        moved = np.abs(outputs[one][1] - outputs[other][1])
        found[f"nats_{one}_{other}"] = float(moved.mean())
        found[f"nats_max_{one}_{other}"] = float(moved.max())
    return found


def cases(*, is_tiny: bool) -> Iterator[tuple[str, str]]:
    """Yield the models and variants, the most important first."""
    names = ["tiny"] if is_tiny else ["1.7b", "8b", "0.6b"]
    for name in names:
        yield name, "eager"
        yield name, "compiled"
    yield "tiny" if is_tiny else "gradients", "gradients"
    for variant in ("outside", "blocks", "head", "offloaded"):
        # A CPU has no host memory to offload to.
        if variant != "offloaded" or not is_tiny:
            yield "tiny" if is_tiny else "0.6b", variant


def run_case(name: str, variant: str, scratch: Path) -> dict[str, Any]:
    """Measure one case in this process."""
    shape = SHAPES["0.6b"]._replace(layers=4) if name == "gradients" else SHAPES.get(name, TINY)
    path = scratch / name
    write_model(path, shape)
    if variant == "gradients":
        return gradients(path, shape)
    choose(variant)
    return step(path, shape, variant)


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("learner_gpu.json"))
    parser.add_argument("--only", nargs="*", default=[], help="NAME or NAME:VARIANT")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="start no case after")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        name, variant, scratch = given.case
        found = run_case(name, variant, Path(scratch))
        given.out.write_text(json.dumps(found))
        return
    results: dict[str, Any] = {}
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in cases(is_tiny=given.tiny):
            case = f"{name}:{variant}"
            if given.only and not {name, case} & set(given.only):
                continue
            if time.perf_counter() - begun_s > given.total_s:
                print(case, "left out: --total-s is over")
                continue
            out = Path(scratch, "result.json")
            out.unlink(missing_ok=True)
            command = [sys.executable, "-m", "benchmarks.learner.learner_gpu", "--out", str(out)]
            started_s = time.perf_counter()
            try:
                run = subprocess.run(
                    [*command, "--case", name, variant, scratch],
                    timeout=LIMIT_S,
                    capture_output=True,
                    text=True,
                )
                text = run.stderr
            except subprocess.TimeoutExpired as error:
                said = (error.stderr or b"").decode(errors="replace")
                text = f"past its limit of {LIMIT_S:g} s\n{said}"
            found = json.loads(out.read_text()) if out.exists() else {"failed": text[-3000:]}
            found["warnings"] = [x for x in text.splitlines() if "torch.compile failed" in x]
            found["process_s"] = time.perf_counter() - started_s
            results[case] = found
            # After each case: a lent machine may go before the last one.
            given.out.write_text(json.dumps(results, indent=1))
            short = {k: v for k, v in found.items() if k != "longest" and v}
            print(case, json.dumps(short, default=str), flush=True)


if __name__ == "__main__":
    main()
