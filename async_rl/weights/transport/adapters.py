"""Adapters as files, and the weights of a model's directory to which their products are added.

The weights are read anew for each push, one tensor at a time: the kernel keeps the files in memory
that it can take back, where a copy of this process would occupy a second model's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from async_rl.core.errors import BaseMissing
from async_rl.protocol.weights import Manifest
from async_rl.weights.merging import Adapter
from async_rl.weights.transport.buckets import dtype_of
from async_rl.weights.transport.changes import Bytes


def to_bytes(adapter: Adapter, version: int) -> bytes:
    """Return a safetensors file with the tensors of an adapter."""
    content: bytes = save(dict(adapter.tensors), {"version": str(version)})
    return content


def from_bytes(content: bytes, scaling: float) -> Adapter:
    """Read such a file. Raises BaseMissing if it is damaged."""
    try:
        return Adapter(tensors=load(content), scaling=scaling)
    except SafetensorError as error:
        raise BaseMissing(f"the file of an adapter is damaged: {error}") from error


class BaseWeights:
    """The safetensors files of a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Path] = {}

    def tensors(
        self, manifest: Manifest, adapter: Adapter, *, only_changed: bool
    ) -> Iterator[Bytes | None]:
        """Yield the tensors of the manifest that base and adapter make together, as bytes; with
        `only_changed` None in place of each that the adapter does not change.

        Raises BaseMissing if the directory does not have a tensor under the manifest's name and in
        its shape.
        """
        for entry in manifest.tensors:
            if only_changed and not adapter.changes(entry.name):
                yield None
                continue
            weight = self._read(entry.name)
            if list(weight.shape) != entry.shape:
                raise BaseMissing(
                    f"{entry.name} has shape {list(weight.shape)} in {self._path}, the learner has"
                    f" {entry.shape}"
                )
            merged = adapter.merged(entry.name, weight).to(dtype_of(entry))
            array: Bytes = merged.contiguous().view(-1).view(torch.uint8).numpy()
            yield array

    def _read(self, name: str) -> torch.Tensor:
        try:
            if not self._files:
                for file in sorted(self._path.glob("*.safetensors")):
                    with safe_open(file, framework="pt") as weights:
                        self._files.update(dict.fromkeys(weights.keys(), file))
            # Opened for each tensor: pages of an open file count as memory of this process.
            with safe_open(self._files[name], framework="pt") as weights:
                tensor: torch.Tensor = weights.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise BaseMissing(f"{self._path} has no base weights {name}: {error!r}") from error
        return tensor
