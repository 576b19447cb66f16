"""Compare the tokens per second of vLLM with merged weights, with an adapter of its own LoRA, and
with the products of adapters that generators use on a CPU (generation/vllm/worker.py).

Run: `python -m benchmarks.generation.lora_serving [--model DIR] [--groups N] [--rounds N] [--core
N]`. Without a model a random one has the shape of the embedded model. The adapter has rank 16 in
all linear layers but the output head, with random numbers. All engines are vLLM's offline `LLM`
with equal settings, each in its own process pinned to the same core. They answer the same prompts
in alternating rounds; one works while the other waits. The ratio is computed from CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import figure
from benchmarks.generation.generation import (
    GROUP_SIZE,
    IN_FLIGHT,
    LONGEST,
    Child,
    Clock,
    prompts,
    random_model,
    settings,
    tell,
)

RANK = 16
KINDS = ("merged", "adapter", "grouped")
# Token ids, so that all engines score the same text.
ROW = [3 + 7 * i % 400 for i in range(40)]


def prepare(model: Path, directory: Path) -> None:
    """Write `merged` and `base` with `adapter` into the directory."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.save_pretrained(directory / "base")
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    adapted = get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.01)
    adapted.save_pretrained(directory / "adapter")
    adapted.merge_and_unload().save_pretrained(directory / "merged")


def serve(kind: str, directory: Path) -> None:
    """Run one engine; each line on stdin names a round."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    request = None
    lora: dict[str, Any] = {}
    if kind != "merged":
        request = LoRARequest("adapter", 1, str(directory / "adapter"))
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
    if kind == "grouped":
        # Importing it in the worker's process changes the products.
        lora["worker_extension_cls"] = "async_rl.generation.vllm.worker.SharedWeightsExtension"
    started_s = time.perf_counter()
    llm = LLM(
        model=str(directory / ("base" if request else "merged")),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=IN_FLIGHT,
        kv_cache_memory_bytes=768 << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **lora,
    )
    scores = llm.generate(
        [TokensPrompt(prompt_token_ids=ROW)],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
        lora_request=request,
    )[0].prompt_logprobs
    found = [told[token].logprob for token, told in zip(ROW[1:], scores[1:], strict=True)]
    tell(start_s=time.perf_counter() - started_s, **{str(i): x for i, x in enumerate(found)})
    params = SamplingParams(
        n=GROUP_SIZE, max_tokens=LONGEST, ignore_eos=True, logprobs=0, detokenize=False
    )
    num_groups = int(os.environ["LORA_SERVING_GROUPS"])
    for line in sys.stdin:
        asked = [TokensPrompt(prompt_token_ids=row) for row in prompts(int(line))[:num_groups]]
        clock = Clock()
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=request)
        tell(
            num_tokens=sum(len(sample.token_ids) for out in outputs for sample in out.outputs),
            **clock.read(),
        )


def compare(model: Path, directory: Path, options: argparse.Namespace) -> None:
    """Alternate the rounds of both engines and print the figures."""
    prepare(model, directory)
    children = {
        kind: Child(kind, directory, options.core, "benchmarks.generation.lora_serving")
        for kind in KINDS
    }
    for index in range(-1, options.rounds):
        for child in children.values():
            child.play(index)
    for kind, child in children.items():
        child.close()
        figure(f"{kind}: one core", child.rate("wall_s"), "tokens/s")
        figure(f"{kind}: one core", child.rate("cpu_s"), "tokens/CPU s")
    merged, *applied = children.values()
    for kind, child in zip(KINDS[1:], applied, strict=True):
        ratios = [
            (theirs["num_tokens"] / theirs["cpu_s"]) / (ours["num_tokens"] / ours["cpu_s"])
            for ours, theirs in zip(merged.rounds, child.rounds, strict=True)
        ]
        figure(f"{kind} over merged weights, CPU time", statistics.median(ratios), "x")
        figure(f"{kind}: lowest round", min(ratios), "x")
        figure(f"{kind}: highest round", max(ratios), "x")
        pairs = ((merged.started[str(i)], child.started[str(i)]) for i in range(len(ROW) - 1))
        gap = max(abs(ours - theirs) for ours, theirs in pairs)
        figure(f"{kind}: log-probs, largest difference", gap, "nats")


def main() -> None:
    """Compare both, or with --child run one engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--child", choices=KINDS)
    options = parser.parse_args()
    if options.child:
        from async_rl.generation.environment import prepare_environment

        prepare_environment(settings(options.model / "base"), [options.core])
        serve(options.child, options.model)
        return
    os.environ["LORA_SERVING_GROUPS"] = str(options.groups)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or random_model(Path(directory) / "model")
        compare(model, Path(directory), options)


if __name__ == "__main__":
    main()
