"""Measure how many 16-bit weights an AdamW step changes, and what sending only these saves.

Run: `python -m benchmarks.weights.changes [MODEL] [--steps N] [--rates 1e-6 5e-6 2e-5]`. MODEL is a
Hugging Face directory, by default the model of `make real`; without it nothing is measured. Each
step is a policy gradient with advantages of both signs on answers to the task of `conf=real`,
clipped to norm 1, on float32 weights. After each step the weights are published in bfloat16, with
and without a comparison, and go through files in both forms into the blocks of two generators.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from async_rl.weights.block import SharedTensors
from async_rl.weights.media import FileSender, LearnerSide
from async_rl.weights.membership import Load
from async_rl.weights.receiving import FileReader
from async_rl.weights.tensors import tensor_spec
from benchmarks.figures import figure

MODEL = Path(__file__).parents[2] / "build" / "real" / "SmolLM2-135M-Instruct"
NUM_SEQUENCES, LENGTH = 8, 64
LIFE = ("generator", 1)
LOAD = Load(number=1, version=0, members=frozenset([LIFE]), missing={LIFE})


def batches(model: Path) -> Iterator[torch.Tensor]:
    """Yield token ids [NUM_SEQUENCES, LENGTH] of rows of the task, without end."""
    from transformers import AutoTokenizer

    from async_rl.examples.short_sentences import train

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    texts = [str(row) for row in train()]
    for first in range(0, len(texts), NUM_SEQUENCES):
        found = [tokenizer.encode(text)[:LENGTH] for text in texts[first : first + NUM_SEQUENCES]]
        filled = [(ids * LENGTH)[:LENGTH] for ids in found]
        yield torch.tensor(filled)


def steps(model: Path, rate: float, num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the bfloat16 weights before the first step and after each."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.999))
    data = batches(model)
    for number in range(num_steps + 1):
        yield {name: tensor.bfloat16() for name, tensor in policy.named_parameters()}
        if number == num_steps:
            return
        ids = next(data)
        logits = policy(ids).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        advantages = torch.randn(len(ids), 1)
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sender_through(folder: Path, exporter: Any) -> FileSender:
    """Return a sender through files of a folder, without a learner next to it."""
    nothing: Any = None
    return FileSender(
        LearnerSide(
            config=nothing,
            folder=str(folder),
            life="L",
            host="127.0.0.1",
            device=torch.device("cpu"),
            exporter=exporter,
            push_s=60,
        )
    )


class Form:
    """One sender with one generator. sends_changes: false = all weights, each time."""

    def __init__(self, folder: Path, *, sends_changes: bool) -> None:
        self._sends_changes = sends_changes
        self._reader = FileReader()
        self._exporter = SimpleNamespace(adapter=None, block=SimpleNamespace(changes=None))
        self._sender = sender_through(folder, self._exporter)
        self._publisher: SharedTensors | None = None

    def push(self, version: int, tensors: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Return the seconds from the learner to the generator's block, and the file's bytes."""
        if self._publisher is None:
            specs = [tensor_spec(name, tensor) for name, tensor in tensors.items()]
            self._publisher = SharedTensors(specs)
        started_s = time.perf_counter()
        manifest = self._publisher.write(
            version, tensors.values(), compares=self._sends_changes and version > 0
        )
        self._exporter.block.changes = self._publisher.changes
        if self._sends_changes:
            stored = asyncio.run(self._sender.source(manifest, LOAD, LIFE))
        else:
            stored = self._sender.write(manifest)
        local = self._reader.fetch(stored, manifest)
        passed_s = time.perf_counter() - started_s
        assert local.checksum == manifest.checksum
        return passed_s, os.stat(stored.url.removeprefix("file://")).st_size

    def close(self) -> None:
        """Free the block and delete the files."""
        self._reader.close()
        self._sender.close()
        if self._publisher is not None:
            self._publisher.close()


def measure(model: Path, rate: float, num_steps: int) -> None:
    """Measure one learning rate."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Form(Path(folder) / "whole", sends_changes=False)
        changes = Form(Path(folder) / "changes", sends_changes=True)
        before: dict[str, torch.Tensor] = {}
        shares, bytes_ratios, time_ratios = [], [], []
        for version, tensors in enumerate(steps(model, rate, num_steps)):
            all_s, all_bytes = whole.push(version, tensors)
            changed_s, changed_bytes = changes.push(version, tensors)
            if version:
                changed = sum(int((before[name] != tensors[name]).sum()) for name in tensors)
                shares.append(changed / sum(tensor.numel() for tensor in tensors.values()))
                bytes_ratios.append(changed_bytes / all_bytes)
                time_ratios.append(changed_s / all_s)
            before = tensors
        for form in (whole, changes):
            form.close()
    name = f"rate {rate:g}, {num_steps} steps"
    figure(f"{name}: weights changed, median", 100 * statistics.median(shares), "%")
    figure(f"{name}: bytes of the file, of all", 100 * statistics.median(bytes_ratios), "%")
    figure(f"{name}: time to the generator, of all", 100 * statistics.median(time_ratios), "%")


def main() -> None:
    """Measure each rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 5e-6, 2e-5])
    given = parser.parse_args()
    if not given.model.is_dir():
        print(f"skipped: no model at {given.model}; `make real` converts one, or name a directory")
        return
    for rate in given.rates:
        measure(given.model, rate, given.steps)


if __name__ == "__main__":
    main()
