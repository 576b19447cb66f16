"""Compare the tokens per second that programs get from a training service with those of its engine
alone.

Run: `python -m benchmarks.generation.service_sampling [--model DIR] [--requests N] [--rounds N]
[--adapter]`. The service is `async-rl launch conf=serve` with one generator; 64 sampling sessions
of the unmodified client (package tinker) have a request in flight each: a prompt of 24 tokens, 8
samples of 45 tokens. Without a model a random one has the shape of the embedded model. The engine
alone answers the same requests, 64 in flight, on the cores of the generator in a process of its
own. Both exist at the same time and work in turns. The client's process has the other cores.
--adapter: an adapter of rank 8 instead of the base model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import figure
from benchmarks.generation.generation import random_model

NUM_CLIENTS, NUM_SAMPLES, NUM_TOKENS, PROMPT_TOKENS = 64, 8, 45, 24


def settings(model: Path) -> list[str]:
    """Return the settings of the service, whose engine is also the engine alone."""
    return [
        f"model.path={model}",
        "data.max_prompt_tokens=64",
        "data.max_response_tokens=64",
        "generation.vllm.kv_cache_mb=512",
    ]


def model_with_words(directory: Path) -> Path:
    """Write a random model with a tokenizer, which samples that end with a text need."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = random_model(directory)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(697)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    return model


def prompts(number: int, count: int) -> list[list[int]]:
    """Return the prompts of a round."""
    rng = np.random.default_rng(number)
    return [rng.integers(10, 600, PROMPT_TOKENS).tolist() for _ in range(count)]


async def engine_alone(model: Path, adapter: str) -> None:
    """Answer the rounds that standard input names; print tokens and seconds."""
    from async_rl.composition.compose import compose
    from async_rl.generation.environment import prepare_environment
    from async_rl.generation.opener import engine_opener
    from async_rl.protocol.service import Sample

    config = compose("serve", settings(model))
    os.sched_setaffinity(0, config.generators.cores)
    prepare_environment(config, config.generators.cores)
    engine: Any = await (await asyncio.to_thread(engine_opener, config, model))()
    in_flight = asyncio.Semaphore(NUM_CLIENTS)

    async def one(name: str, tokens: list[int]) -> int:
        async with in_flight:
            sampled = await engine.sample(
                Sample(
                    request_id=name,
                    token_ids=np.array(tokens, np.int32),
                    num_samples=NUM_SAMPLES,
                    max_tokens=NUM_TOKENS,
                    temperature=1.0,
                    stop_ids=(),
                    adapter=adapter,
                )
            )
        return sum(len(sequence.token_ids) for sequence in sampled.sequences)

    tell(0, 0.0)
    while line := await asyncio.to_thread(sys.stdin.readline):
        number, count = map(int, line.split())
        started_s = time.perf_counter()
        rows = prompts(number, count)
        tokens = await asyncio.gather(*(one(f"{number}-{i}", row) for i, row in enumerate(rows)))
        tell(sum(tokens), time.perf_counter() - started_s)
    await engine.close()


def client(model: Path, url: str, key: str, has_adapter: bool) -> None:
    """As `engine_alone`, through the service."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=key)
    sampler: Any = None
    if has_adapter:
        trained = service.create_lora_training_client(base_model=str(model), rank=8).result()
        sampler = trained.save_weights_for_sampler("first").result().path
        tell(0, 0.0, adapter=sampler)
        sessions = [service.create_sampling_client(model_path=sampler) for _ in range(NUM_CLIENTS)]
    else:
        tell(0, 0.0, adapter="")
        sessions = [
            service.create_sampling_client(base_model=str(model)) for _ in range(NUM_CLIENTS)
        ]
    clients = [made.result() if hasattr(made, "result") else made for made in sessions]
    params = types.SamplingParams(max_tokens=NUM_TOKENS, stop=[])
    for line in sys.stdin:
        number, count = map(int, line.split())
        started_s = time.perf_counter()
        rows = prompts(number, count)
        futures = [
            clients[i % NUM_CLIENTS].sample(types.ModelInput.from_ints(row), NUM_SAMPLES, params)
            for i, row in enumerate(rows)
        ]
        tokens = sum(len(q.tokens) for future in futures for q in future.result().sequences)
        tell(tokens, time.perf_counter() - started_s)


def tell(tokens: int, seconds: float, **more: str) -> None:
    """Print a line for the parent."""
    sys.stdout.write(json.dumps({"tokens": tokens, "seconds": seconds, **more}) + "\n")
    sys.stdout.flush()


class Child:
    """One side of the comparison, in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.generation.service_sampling", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.started = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"tokens"'):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"a side of the comparison ended with {self._process.wait()}")

    def play(self, number: int, count: int) -> float:
        """Return the tokens per second of a round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number} {count}\n")
        self._process.stdin.flush()
        found = self._read()
        return float(found["tokens"] / found["seconds"])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(model: Path, directory: Path, options: argparse.Namespace) -> None:
    """Start the service, alternate the rounds and print the figures."""
    from async_rl.service.address import address_of

    run_dir = directory / "service"
    async_rl = str(Path(sys.executable).with_name("async-rl"))
    places = [f"output_dir={directory}", "run_name=service"]
    with (directory / "output").open("wb") as output:
        run = subprocess.Popen(
            [async_rl, "launch", "conf=serve", *settings(model), *places],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    children: list[Child] = []
    try:
        while not (run_dir / "service" / "address.json").exists():
            if run.poll() is not None:
                raise RuntimeError((directory / "output").read_text())
            time.sleep(0.5)
        address = address_of(run_dir)
        url = f"http://127.0.0.1:{address.port}"
        kind = ["--adapter"] if options.adapter else []
        through = Child("--client", str(model), url, address.api_key, *kind)
        children.append(through)
        adapter = through.started["adapter"]
        if adapter:
            run_id, kind, name = adapter.removeprefix("tinker://").split("/")
            folder = run_dir / "service" / "runs" / run_id.replace(":", ".") / kind
            adapter = str(next(folder.glob(f"{name}~*")))
        alone = Child("--engine", str(model), adapter)
        children.append(alone)
        for side in children:
            side.play(-1 % 1000, NUM_CLIENTS)  # a warm-up
        pairs = [
            (through.play(number, options.requests), alone.play(number, options.requests))
            for number in range(options.rounds)
        ]
    finally:
        for side in children:
            side.end()
        run.terminate()
        run.wait()
    figure("through the service", statistics.median(a for a, _ in pairs), "tokens/s")
    figure("engine alone", statistics.median(b for _, b in pairs), "tokens/s")
    ratios = [a / b for a, b in pairs]
    figure("service over engine", statistics.median(ratios), "x")
    figure("lowest and highest round", min(ratios), "x")
    figure("lowest and highest round", max(ratios), "x")


def main() -> None:
    """Compare both, or be one of the children."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--client", nargs=3)
    parser.add_argument("--engine", nargs=2)
    options = parser.parse_args()
    if options.client:
        model, url, key = options.client
        client(Path(model), url, key, options.adapter)
    elif options.engine:
        asyncio.run(engine_alone(Path(options.engine[0]), options.engine[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = options.model or model_with_words(Path(directory) / "model")
            compare(model, Path(directory), options)


if __name__ == "__main__":
    main()
