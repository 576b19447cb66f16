"""Measure the bytes and the time of a push through files: the adapter, or all merged weights.

Run: `python -m benchmarks.weights.lora_push [MODEL] [--pushes N]`. MODEL is a Hugging Face
directory, by default the model of `make real`; without it only a random model with the shape of the
embedded one is measured. The adapter has rank 16 in all linear layers but the output head, with
other numbers in each version. Both forms of a version go one after the other into the blocks of two
generators, whose checksums are compared with the learner's. The first push, which touches new
memory, is not counted. The table for models of 7B and 70B parameters is computed from their shapes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.weights.adapters import Adapter
from async_rl.weights.block import SharedTensors, tensor_spec
from async_rl.weights.files import FileReader
from benchmarks.figures import figure
from benchmarks.generation.generation import random_model
from benchmarks.weights.changes import MODEL, sender_through

RANK = 16
# Layers, hidden size, size of keys and values, size of the MLP, parameters: Llama 2.
COMPUTED = {
    "7B": (32, 4096, 4096, 11008, 6_738_415_616),
    "70B": (80, 8192, 1024, 28672, 68_976_648_192),
}


def versions(base: dict[str, torch.Tensor], count: int) -> Iterator[Adapter]:
    """Yield adapters with random numbers for all linear layers but the head."""
    torch.manual_seed(0)
    for _ in range(count):
        pairs = {}
        for name, weight in base.items():
            if name.endswith("_proj.weight"):
                layer = f"base_model.model.{name.removesuffix('weight')}lora_"
                pairs[f"{layer}A.weight"] = 0.02 * torch.randn(RANK, weight.shape[1])
                pairs[f"{layer}B.weight"] = 0.002 * torch.randn(weight.shape[0], RANK)
        yield Adapter(tensors=pairs, scaling=2.0)


class Form:
    """One sender with one generator."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.reader = FileReader(model)
        self.sender = sender_through(folder)

    def push(self, manifest: Manifest, adapter: Adapter | None) -> tuple[float, float, int]:
        """Return the seconds from the block to the generator's block, CPU seconds, and the bytes of
        the file.
        """
        started_s, spent_s = time.perf_counter(), time.process_time()
        if adapter is None:
            stored: StoredFile = self.sender.write(manifest)
        else:
            stored = self.sender._write_adapter(manifest, (), adapter)
        local = self.reader.fetch(stored, manifest)
        passed_s = time.perf_counter() - started_s
        assert local.checksum == manifest.checksum
        size_bytes = os.stat(stored.url.removeprefix("file://")).st_size
        return passed_s, time.process_time() - spent_s, size_bytes

    def close(self) -> None:
        """Free the block and delete the files."""
        self.reader.close()
        self.sender.close()


def measure(name: str, model: Path, dtype: torch.dtype, num_pushes: int) -> None:
    """Measure one model in one type."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    base = {key: tensor.detach() for key, tensor in loaded.named_parameters()}
    specs = [tensor_spec(key, tensor.to(dtype)) for key, tensor in base.items()]
    merging_s, rows = [], []
    with tempfile.TemporaryDirectory() as folder, SharedTensors(specs) as publisher:
        forms = [Form(Path(folder) / kind, model) for kind in ("all", "adapter")]
        for version, adapter in enumerate(versions(base, num_pushes + 1)):
            started_s = time.process_time()
            merged = (adapter.merged(key, tensor) for key, tensor in base.items())
            manifest = publisher.write(version, (tensor.to(dtype) for tensor in merged))
            merging_s.append(time.process_time() - started_s)
            whole = forms[0].push(manifest, None)
            rows.append((whole, forms[1].push(manifest, adapter)))
        for form in forms:
            form.close()
    rows = rows[1:]
    kind = f"{name} in {str(dtype).removeprefix('torch.')}"
    for index, form in enumerate(("all weights", "adapter")):
        figure(f"{kind}: {form}, bytes of a push", rows[0][index][2] / 1e6, "MB")
        figure(f"{kind}: {form}, to the block", statistics.median(r[index][0] for r in rows), "s")
        figure(f"{kind}: {form}, CPU", statistics.median(r[index][1] for r in rows), "s")
    figure(f"{kind}: bytes, of all", 100 * rows[0][1][2] / rows[0][0][2], "%")
    figure(f"{kind}: time, of all", 100 * statistics.median(b[0] / a[0] for a, b in rows), "%")
    figure(f"{kind}: CPU, of all", 100 * statistics.median(b[1] / a[1] for a, b in rows), "%")
    figure(f"{kind}: learner's merge and write, CPU", statistics.median(merging_s[1:]), "s")


def compute() -> None:
    """Print the bytes of models that this machine cannot hold."""
    for name, (layers, hidden, keys, inner, parameters) in COMPUTED.items():
        sides = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner)
        figure(f"{name}, computed: all weights in bfloat16", 2 * parameters / 1e6, "MB")
        figure(f"{name}, computed: adapter in float32", 4 * layers * RANK * sides / 1e6, "MB")


def main() -> None:
    """Measure two models and compute the figures of larger ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--pushes", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        embedded = random_model(Path(folder) / "embedded")
        measure("embedded", embedded, torch.float32, given.pushes)
    if given.model.is_dir():
        for dtype in (torch.float32, torch.bfloat16):
            measure(given.model.name, given.model, dtype, given.pushes)
    else:
        print(f"skipped: no model at {given.model}; `make real` converts one")
    compute()


if __name__ == "__main__":
    main()
