"""Measure on one GPU what a push costs a step that runs, and what leaving the device costs.

Run: `python -m benchmarks.weights.push_gpu OUT [--layers N] [--tiny]`; two minutes on a GPU with
40 GB and more. It writes OUT/push_gpu.json and prints a table; a part that fails is named there,
and the other parts continue. The model has the shape of Qwen3-1.7B in bfloat16. The sender's side
is the product's, with a communicator of one rank, so no link is measured. `--tiny` runs all parts
on a small model, without a GPU too, and then measures nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.composition.compose import compose
from async_rl.core.errors import AsyncRLError
from async_rl.core.types import Group
from async_rl.learner.trainer import Trainer
from async_rl.protocol.weights import Manifest, Seat, SendPart, TensorEntry
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.communicator import Communicator, begin, choose_interface, join
from async_rl.weights.receiving import BUCKET_BYTES, buckets
from async_rl.weights.rendezvous import Rendezvous
from async_rl.weights.sending import SendingRank
from async_rl.weights.tensors import summed, tensor_spec
from benchmarks.learner.learner import make_groups, mixed_lengths

Numbers = dict[str, Any]
_HOST = "127.0.0.1"
_GB = 1e9
_FAILURES = (
    RuntimeError,
    ValueError,
    OSError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    subprocess.SubprocessError,
)


class Bench:
    """The GPU, or the CPU in its place, and what was measured."""

    def __init__(self, *, is_tiny: bool, layers: int, scratch: Path) -> None:
        self.has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.has_gpu else torch.device("cpu")
        self.is_tiny = is_tiny
        self.layers = layers
        self.scratch = scratch
        self.results: Numbers = {}

    def part(self, name: str, measure: Callable[[], Numbers]) -> None:
        """Measure one part; note its numbers, or why it failed."""
        started_s = time.perf_counter()
        numbers: Numbers = {}
        try:
            numbers = measure()
        except (*_FAILURES, AsyncRLError) as error:
            numbers = {"failed": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        numbers["part_s"] = time.perf_counter() - started_s
        self.results[name] = numbers
        print(f"{name}: {json.dumps(numbers)}", flush=True)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.has_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time of some work and all that it enqueued."""
        self.wait()
        started_s = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started_s

    # ---- copies ----

    def copies(self) -> Numbers:
        """Rates between the GPU and pageable, touched, page-locked and registered memory, GB/s."""
        size = (16 << 20) if self.is_tiny else (1 << 30)
        on_gpu = torch.ones(size, dtype=torch.uint8, device=self.device)
        numbers: Numbers = {}

        def rate(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
            taken_s = self.seconds(lambda: target.copy_(source, non_blocking=True))
            numbers[f"{name}_gb_per_s"] = size / taken_s / _GB

        pageable = torch.empty(size, dtype=torch.uint8)
        rate("to_new_pageable", pageable, on_gpu)
        rate("to_touched_pageable", pageable, on_gpu)
        rate("from_pageable", on_gpu, pageable)
        started_s = time.perf_counter()
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self.has_gpu)
        numbers["pin_s_per_gb"] = (time.perf_counter() - started_s) / (size / _GB)
        rate("to_pinned", pinned, on_gpu)
        rate("from_pinned", on_gpu, pinned)
        rate("pageable_to_pinned", pinned, pageable)
        fd = os.memfd_create("push_gpu")
        os.ftruncate(fd, size)
        block = mmap.mmap(fd, size)
        registered = torch.frombuffer(block, dtype=torch.uint8)
        registered.fill_(1)
        if self.has_gpu:
            runtime: Any = torch.cuda.cudart()
            started_s = time.perf_counter()
            code = runtime.cudaHostRegister(registered.data_ptr(), size, 0)
            numbers["register_memfd_s_per_gb"] = (time.perf_counter() - started_s) / (size / _GB)
            numbers["register_memfd_code"] = int(code)
            rate("to_registered_memfd", registered, on_gpu)
            rate("from_registered_memfd", on_gpu, registered)
            runtime.cudaHostUnregister(registered.data_ptr())
        return numbers

    # ---- changed words ----

    def changed_words(self) -> Numbers:
        """Publish 3.4 GB of which one word in a hundred changed, with and without comparison."""
        numel, count = (1000, 3) if self.is_tiny else (1 << 26, 25)
        tensors = [
            torch.ones(numel, dtype=torch.bfloat16, device=self.device) for _ in range(count)
        ]
        specs = [tensor_spec(str(i), tensor) for i, tensor in enumerate(tensors)]
        numbers: Numbers = {}
        with SharedTensors(specs, torch.cuda if self.has_gpu else None) as block:
            for version, name in enumerate(
                ("first_s", "whole_s", "compared_s", "compared_again_s")
            ):
                # Tensors of float32 would take another way.
                torch._foreach_add_([tensor[::100] for tensor in tensors], 1.0)

                def publish(version: int = version) -> None:
                    sums: list[torch.Tensor] = []
                    passed = summed(tensors, sums)
                    block.write(version, passed, sums, compares=version >= 2)

                numbers[name] = self.seconds(publish)
            assert block.changes is not None
            content = block.changes.content
            numbers["gb"] = 2 * numel * count / _GB
            numbers["changes_gb"] = len(content) / _GB
            numbers["changes_to_gpu_s"] = self.seconds(lambda: content.to(self.device))
        return numbers

    # ---- a push beside work on the default stream ----

    def push_beside_products(self) -> Numbers:
        """A push of 3.4 GB while products of matrices fill the default stream for seconds."""
        size = 8 if self.is_tiny else 8192
        a = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        b = torch.randn_like(a)
        out = torch.empty_like(a)

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        products(3)
        each_s = self.seconds(lambda: products(20)) / 20
        count = max(1, min(2000, round(2.0 / each_s)))
        if self.is_tiny:
            count = 10
        numel = 1000 if self.is_tiny else 1 << 26
        num_tensors = 3 if self.is_tiny else 25
        shape = torch.empty(numel, dtype=torch.bfloat16, device="meta")
        specs = [tensor_spec(f"t{i}", shape) for i in range(num_tensors)]
        with self.block(specs) as block:
            zeros = torch.zeros(2 * numel, dtype=torch.uint8)
            manifest = block.write(1, [zeros] * num_tensors)
            return {"product_ms": 1e3 * each_s} | self._pushes(
                block, manifest, lambda: products(count), "work"
            )

    @contextmanager
    def block(self, specs: Iterable[TensorEntry]) -> Iterator[SharedTensors]:
        """Open the product's block, and note how long that takes."""
        started_s = time.perf_counter()
        with SharedTensors(specs, torch.cuda if self.has_gpu else None) as block:
            size_gb = block.content.numel() / _GB
            self.results["open_block_s_per_gb"] = (time.perf_counter() - started_s) / size_gb
            yield block

    def _pushes(
        self, block: SharedTensors, manifest: Manifest, work: Callable[[], object], name: str
    ) -> Numbers:
        """Push alone, and beside the work, on the default stream and on the own one."""
        numbers: Numbers = {"gb": manifest.total_bytes / _GB}
        with sender(self.device) as (communicator, seat, rank):
            part = SendPart(manifest=manifest, seat=seat, rank=0)
            ways: dict[str, Callable[[], None]] = {
                "own_stream": lambda: rank.send_pieces(communicator, part, block.content),
                "default_stream": lambda: send_on_default(communicator, manifest),
            }
            numbers[f"{name}_alone_s"] = self.seconds(work)
            for way, push in ways.items():
                # The first push allocates, and connects NCCL.
                numbers[f"{way}_first_push_s"] = self.seconds(push)
                numbers[f"{way}_push_alone_s"] = self.seconds(push)
                beside_s, push_s = self._beside(work, push)
                numbers[f"{way}_push_beside_{name}_s"] = push_s
                numbers[f"{way}_{name}_beside_push_s"] = beside_s
        return numbers

    def _beside(self, work: Callable[[], object], push: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of the work and of a push that starts just after it."""
        is_begun = threading.Event()

        def pushes() -> float:
            is_begun.wait()
            # The stream is full by now.
            time.sleep(0.02)
            started_s = time.perf_counter()
            push()
            return time.perf_counter() - started_s

        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(pushes)
            self.wait()
            started_s = time.perf_counter()
            is_begun.set()
            work()
            if self.has_gpu:
                torch.cuda.current_stream().synchronize()
            work_s = time.perf_counter() - started_s
            return work_s, pushing.result()

    # ---- the product's learner ----

    def open_trainer(self) -> Numbers:
        """Write the model and build the trainer."""
        started_s = time.perf_counter()
        path = random_model(self.scratch, self.layers, is_tiny=self.is_tiny, device=self.device)
        written_s = time.perf_counter() - started_s
        config = compose(
            "grpo_code",
            [
                "model.dtype=bfloat16",
                "data.max_prompt_tokens=1",
                "data.max_response_tokens=1",
                "learner.budget_tokens=16384",
                "learner.gradient_checkpointing=true",
                f"learner.gpus_each={int(self.has_gpu)}",
            ],
        )
        self.trainer = Trainer(config, path, rank=0, world_size=1, device=self.device)
        specs = self.trainer.tensor_specs()
        self.size_bytes = sum(spec.size_bytes for spec in specs)
        self.groups = training_groups(is_tiny=self.is_tiny)
        return {
            "model_written_s": written_s,
            "loaded_s": time.perf_counter() - started_s - written_s,
            "published_gb": self.size_bytes / _GB,
        }

    def push_beside_step(self) -> Numbers:
        """Publish the weights, and push them while the trainer makes steps."""
        trainer = self.trainer
        for _ in range(2):
            trainer.step(self.groups, 0)
        specs = trainer.tensor_specs()
        with self.block(specs) as block:
            numbers: Numbers = {}
            for name in ("first_publish_s", "publish_s"):
                sums: list[torch.Tensor] = []
                tensors = summed(trainer.full_tensors(), sums)
                started_s = time.perf_counter()
                manifest = block.write(1, tensors, sums)
                numbers[name] = time.perf_counter() - started_s
            return numbers | self._pushes(
                block,
                manifest,
                lambda: [trainer.step(self.groups, 0) for _ in range(2)],
                "two_steps",
            )

    def handover(self) -> Numbers:
        """Leave and enter the device: with memory that is kept, and with new pageable memory."""
        trainer = self.trainer
        numbers: Numbers = {}
        models, moments = trainer._movable
        moved = sum(p.nbytes for model in models for p in model.parameters())
        moved += sum(state[name].nbytes for _, state, name in moments)
        numbers["moved_gb"] = moved / _GB
        for name in ("first", "second", "third"):
            numbers[f"kept_memory_{name}_leave_s"] = self.seconds(trainer.leave_device)
            if self.has_gpu:
                numbers["gpu_gb_left_behind"] = torch.cuda.memory_reserved() / _GB
            numbers[f"kept_memory_{name}_enter_s"] = self.seconds(trainer.enter_device)
        numbers["pageable_leave_s"] = self.seconds(lambda: move(models, moments, "cpu"))
        numbers["pageable_enter_s"] = self.seconds(lambda: move(models, moments, self.device))
        trainer.step(self.groups, 0)
        return numbers


def training_groups(*, is_tiny: bool) -> list[Group]:
    """Groups of about 33,000 tokens."""
    count, prompt, mean = (8, 4, 8) if is_tiny else (64, 128, 384)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, prompt).tolist() for _ in range(count)]
    lengths = [mean] * count if is_tiny else mixed_lengths(count, mean)
    return make_groups(prompts, lengths)


def random_model(scratch: Path, layers: int, *, is_tiny: bool, device: torch.device) -> Path:
    """Save a model with the shape of Qwen3-1.7B, or a tiny one, and random weights."""
    config = Qwen3Config(
        hidden_size=64 if is_tiny else 2048,
        intermediate_size=128 if is_tiny else 6144,
        num_attention_heads=2 if is_tiny else 16,
        num_key_value_heads=1 if is_tiny else 8,
        head_dim=64 if is_tiny else 128,
        num_hidden_layers=1 if is_tiny else layers,
        vocab_size=1000 if is_tiny else 151_936,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    # Random numbers of a GPU take a second, those of a CPU a minute.
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.to("cpu").save_pretrained(scratch / "model")
    return scratch / "model"


def move(models: list[Any], moments: list[Any], device: torch.device | str) -> None:
    """Move models and moments through memory that is new each time."""
    for model in models:
        model.to(device)
    for _, state, name in moments:
        state[name] = state[name].to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def sender(device: torch.device) -> Iterator[tuple[Communicator, Seat, SendingRank]]:
    """The product's sender with a communicator of one rank: NCCL on a GPU, else gloo."""
    rendezvous = Rendezvous(_HOST)
    rendezvous.open("bench")
    kind: Any = "nccl" if device.type == "cuda" else "gloo"
    seat = Seat(
        communicator="bench",
        backend=kind,
        store=rendezvous.address,
        secret=rendezvous.secret,
        host=_HOST,
        world_size=1,
        first_rank=1,
        bucket_bytes=BUCKET_BYTES[kind],
        timeout_s=60.0,
    )
    rank = SendingRank(device, host=_HOST)
    communicator = join(seat, 0, device)
    try:
        yield communicator, seat, rank
    finally:
        communicator.close()
        rank.close()
        rendezvous.close()


def send_on_default(communicator: Communicator, manifest: Manifest) -> None:
    """Send as before 26 November 2026: blocking copies and NCCL on the default stream."""
    buffer = torch.empty(0, dtype=torch.uint8, device=communicator.device)
    with SharedTensorsReader(manifest) as reader:
        block = reader.content
        for bucket in buckets(manifest, 64 << 20):
            flat = block[bucket.begin : bucket.end]
            if len(buffer) < len(flat):
                buffer = torch.empty(len(flat), dtype=torch.uint8, device=communicator.device)
            begin(communicator, buffer[: len(flat)].copy_(flat), 0, timeout_s=60.0)()


def main() -> None:
    """Run all parts."""
    # A segmentation fault on an H200 did not say where.
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        print("no GPU is available: nothing was measured")
        return
    # As the learner sets it (training/ranks.py).
    os.environ.setdefault(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,pinned_max_cached_size_mb:1"
    )
    choose_interface(_HOST)
    disable_progress_bar()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 8e9
    root = shared if has_room else None
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        bench = Bench(is_tiny=arguments.tiny, layers=arguments.layers, scratch=Path(scratch))
        bench.results["card"] = torch.cuda.get_device_name(0) if bench.has_gpu else "none"
        bench.results["torch"] = torch.__version__
        parts = [
            bench.copies,
            bench.changed_words,
            bench.push_beside_products,
            bench.open_trainer,
            bench.push_beside_step,
            bench.handover,
        ]
        for part in parts:
            bench.part(part.__name__, part)
            # After each part: what is measured stays if a later part ends the process.
            text = json.dumps(bench.results, indent=1)
            (arguments.out / "push_gpu.json").write_text(text)
    for part_name, numbers in bench.results.items():
        if isinstance(numbers, dict):
            for name, value in numbers.items():
                said = value if isinstance(value, str) else f"{value:.4g}"
                print(f"| {part_name} | {name} | {said} |")


if __name__ == "__main__":
    main()
