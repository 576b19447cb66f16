"""Whole models that take turns on an engine, for a service whose programs train all weights.

Invariants
- The weights that a sample names draw all its tokens. Weights change while no sample runs, except
  those of a policy, which change under its own samples.
- Samples start in the order of their arrival, so no weights wait forever.
"""

import asyncio
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.core.errors import DataError
from async_rl.generation.engine import Samples
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest
from async_rl.rollouts.sleeping import Sleeping
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec


class Turns:
    """The turns on one engine. model_path: the directory of the base model."""

    def __init__(self, sleeping: Sleeping, model_path: Path) -> None:
        self._sleeping = sleeping
        self._base = model_path
        self._current = ""
        """The policy or the directory whose weights the engine has; empty = the base model."""
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._turn = asyncio.Lock()
        self._loading = asyncio.Lock()

    async def load(self, request: LoadSlot) -> Message:
        """Load the newest weights of a policy if it is its turn; later samples name them."""
        async with self._loading:
            if self._current == request.policy:
                await self._load(request)
        return Ok()

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences as soon as the engine has the weights.

        Raises DataError for a request that the engine refuses and for weights that are not there,
        Unavailable if the engine died.
        """
        name = request.policy or request.adapter
        async with self._turn:
            if name != self._current:
                await self._is_idle.wait()
                async with self._loading:
                    await self._load(request)
                    self._current = name
            self._num_running += 1
            self._is_idle.clear()
        try:
            engine = self._sleeping.engine
            assert isinstance(engine, Samples), "a service's configuration asks for such an engine"
            return await engine.sample(msgspec.structs.replace(request, adapter=""))
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()

    async def _load(self, wanted: LoadSlot | Sample) -> None:
        folder = Path(wanted.adapter) if wanted.adapter else self._base
        block, manifest = await asyncio.to_thread(_block_of, folder, wanted.version)
        try:
            await self._sleeping.engine.load_weights(manifest)
        finally:
            block.close()


def _block_of(folder: Path, version: int) -> tuple[SharedTensors, Manifest]:
    tensors = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be read: {error}") from error
    if not tensors:
        raise DataError(f"{folder} has no weights; save them for sampling again")
    block = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    return block, block.write(version, tensors.values())
