"""Compare the tokens per second of the engine on one core with the rate of vLLM's offline `LLM`.

Run: `python -m benchmarks.generation.generation [--model DIR] [--rounds N] [--core N]`.
Both answer the same prompts in alternating rounds: 64 groups of 8 with the lengths of the embedded
task (prompts of 20-30 tokens, responses of up to 45), 128 samples in flight. Both engines exist at
the same time, each in its own process pinned to the same core; one works while the other waits.
CPU seconds are printed next to wall-clock seconds, because other work on the machine affects them
less; the ratio is computed from CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.composition.compose import compose
from async_rl.composition.overrides import with_defaults
from async_rl.core.calls import EVERYTHING, Support
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener

NUM_GROUPS, GROUP_SIZE, IN_FLIGHT = 64, 8, 128
LONGEST = 45
END_TOKEN = 1


def random_model(
    directory: Path,
    *,
    hidden: int = 192,
    layers: int = 2,
    heads: int = 6,
    vocabulary: int = 697,
    head_dim: int = 32,
) -> Path:
    """Save a random Qwen3, by default with the shape of the embedded model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    config = Qwen3Config(
        **shape,
        num_key_value_heads=heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        eos_token_id=END_TOKEN,
    )
    config.tie_word_embeddings = True
    config.max_position_embeddings = 512
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def settings(model: Path, *more: str) -> Any:
    """Return the configuration as generators of a run receive it."""
    return compose(
        "grpo_code",
        with_defaults(
            [f"model.path={model}", *more],
            ["data.max_prompt_tokens=64", "data.max_response_tokens=64"],
        ),
    )


def prompts(seed: int) -> list[list[int]]:
    """Return the prompts of one round."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 500, size=rng.integers(20, 31)).tolist() for _ in range(NUM_GROUPS)]


def spent_s() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def ours(
    model: Path, supports: Sequence[Support] = (EVERYTHING,), overrides: Sequence[str] = ()
) -> None:
    """Run the engine of the project; each line on stdin names a round. supports: of the rounds, in
    turn; overrides: settings of the engine.
    """
    from async_rl.weights.block import SharedTensors
    from async_rl.weights.tensors import tensor_spec

    config = settings(model, *overrides)
    started_s = time.perf_counter()
    engine = await engine_opener(config, model)()
    start_s = time.perf_counter() - started_s
    tensors = parameters(model)
    publisher = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    await engine.load_weights(publisher.write(0, tensors.values()))
    slots = asyncio.Semaphore(IN_FLIGHT // GROUP_SIZE)

    async def group(name: str, prompt: list[int], support: Support) -> int:
        sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST, support=support)
        async with slots:
            return sum(
                [
                    len(sample.token_ids)
                    async for sample in engine.generate(name, prompt, GROUP_SIZE, sampling)
                ]
            )

    tell(start_s=start_s, memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    while line := await asyncio.to_thread(sys.stdin.readline):
        number = int(line)
        support = supports[number % len(supports)]
        clock = Clock()
        counts = await asyncio.gather(
            *(group(f"{number}-{i}", row, support) for i, row in enumerate(prompts(number)))
        )
        tell(num_tokens=sum(counts), **clock.read())
    await engine.close()
    publisher.close()


def parameters(model: Path) -> dict[str, Any]:
    """Return the tensors of the model as the learner pushes them."""
    from transformers import AutoModelForCausalLM

    return {
        name: tensor.detach()
        for name, tensor in AutoModelForCausalLM.from_pretrained(
            model, dtype="float32"
        ).named_parameters()
    }


def alone(model: Path, supports: Sequence[Support] = (EVERYTHING,)) -> None:
    """Run the offline engine of vLLM with the same settings; each line on stdin names a round.
    supports: of the rounds, in turn, whose grammars act.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    vllm = settings(model).generation.vllm
    started_s = time.perf_counter()
    llm = LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=not any(support.grammar for support in supports),
        structured_outputs_config={"backend": "xgrammar"},
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        kv_cache_memory_bytes=vllm.kv_cache_mb << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    tell(
        start_s=time.perf_counter() - started_s,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    for line in sys.stdin:
        support = supports[int(line) % len(supports)]
        params = SamplingParams(
            n=GROUP_SIZE,
            max_tokens=LONGEST,
            stop_token_ids=[END_TOKEN],
            logprobs=0,
            detokenize=False,
        )
        if support.grammar:
            params.structured_outputs = StructuredOutputsParams(
                **{support.grammar_kind: support.grammar}
            )
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts(int(line))]
        clock = Clock()
        outputs = llm.generate(asked, params, use_tqdm=False)
        tell(
            num_tokens=sum(
                len(sample.token_ids) for output in outputs for sample in output.outputs
            ),
            **clock.read(),
        )


class Clock:
    """Wall-clock and CPU seconds since the object was created."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), spent_s()

    def read(self) -> dict[str, float]:
        """Return both durations."""
        return {"wall_s": time.perf_counter() - self._wall_s, "cpu_s": spent_s() - self._cpu_s}


def tell(**values: float) -> None:
    """Print one line for the parent, marked because vLLM prints other lines."""
    print("told " + json.dumps(values), flush=True)


class Child:
    """The process of one engine."""

    def __init__(
        self, kind: str, model: Path, core: int, module: str = "benchmarks.generation.generation"
    ) -> None:
        command = [
            sys.executable,
            "-m",
            module,
            "--child",
            kind,
            "--model",
            str(model),
            "--core",
            str(core),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.started = self._heard()
        self.rounds: list[dict[str, float]] = []

    def play(self, index: int) -> None:
        """Run one round and record its result, except in a warm-up (negative index)."""
        assert self._process.stdin is not None
        print(abs(index), file=self._process.stdin, flush=True)
        heard = self._heard()
        if index >= 0:
            self.rounds.append(heard)

    def _heard(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("told "):
                heard: dict[str, float] = json.loads(line.removeprefix("told "))
                return heard
        raise RuntimeError(f"the engine's process exited with {self._process.wait()}")

    def rate(self, clock: str) -> float:
        """Return the median tokens per second by this clock."""
        return statistics.median(played["num_tokens"] / played[clock] for played in self.rounds)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    """Start both engines, alternate their rounds and print the figures."""
    from benchmarks.figures import figure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--child", choices=["ours", "alone"])
    options = parser.parse_args()
    if options.child:
        prepare_environment(settings(options.model), [options.core])
        asyncio.run(ours(options.model)) if options.child == "ours" else alone(options.model)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or random_model(Path(directory) / "model")
        engine, reference = Child("ours", model, options.core), Child("alone", model, options.core)
        for index in range(-2, options.rounds):
            engine.play(index)
            reference.play(index)
        engine.close()
        reference.close()
    for name, child in (("engine", engine), ("vLLM alone", reference)):
        figure(f"{name}: start, imports included", child.started["start_s"], "s")
        figure(f"{name}: memory", child.started["memory_mb"], "MB")
        figure(f"{name}: one core, {IN_FLIGHT} in flight", child.rate("wall_s"), "tokens/s")
        figure(f"{name}: one core, {IN_FLIGHT} in flight", child.rate("cpu_s"), "tokens/CPU s")
    ratios = [
        (ours["num_tokens"] / ours["cpu_s"]) / (theirs["num_tokens"] / theirs["cpu_s"])
        for ours, theirs in zip(engine.rounds, reference.rounds, strict=True)
    ]
    figure("engine over vLLM alone, CPU time", statistics.median(ratios), "x", goal="at least 0.9")


if __name__ == "__main__":
    main()
