"""Several policies on one LLM: its base model with the adapter of one slot each (vLLM's LoRA).

Invariants
- Slot 0 is this run's policy; the other slots are for programs of a service (rollouts/turns.py).
- The label of the LLM's weights has the version of every slot, so a token's label shows the version
  of the policy that sampled it, even if a slot was loaded during the request.
- An adapter that cannot be read, or that vLLM refuses, changes nothing for any policy.

Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from safetensors import safe_open
from vllm.lora.request import LoRARequest

from async_rl.core.errors import WeightsError
from async_rl.generation.vllm.engine import VllmEngine
from async_rl.generation.vllm.llm import Llm
from async_rl.protocol.weights import Manifest, Source, StoredFile
from async_rl.weights.adapters import write_peft
from async_rl.weights.files import opened
from async_rl.weights.tensors import checksum

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The bounds of the rank that vLLM can be started with."""


class AppliedAdapter(VllmEngine):
    """The policy of one slot."""

    def __init__(self, llm: Llm, end_token_ids: tuple[int, ...]) -> None:
        super().__init__(llm, end_token_ids)
        # vLLM's ids start at 1, and 0 is the base model. It requires a path for an adapter; the
        # adapter of a slot has no file.
        self._lora = LoRARequest(f"slot {self._index}", self._index + 1, "pushed")

    async def _stage(self, manifest: Manifest, source: Source) -> tuple[str, tuple[bytes, ...]]:
        assert isinstance(source, StoredFile), "model.lora.slots is the learner's setting too"
        with tempfile.TemporaryDirectory(prefix="async_rl-adapter-") as directory:
            # vLLM reads an adapter from a directory of PEFT's form only; a service has such ones.
            if source.scaling is None:
                directory = source.url
            else:
                await asyncio.to_thread(_fetch_peft, manifest, source, Path(directory))
            refusals = await self._vllm.beside("stage_adapter", self._index + 1, directory)
        for refusal in filter(None, refusals):
            raise WeightsError(
                f"vLLM refuses the adapter of version {manifest.version}: {refusal}; its rank may"
                " be at most model.lora.rank"
            )
        return "apply_adapter", ()


def linear_layers(model_path: Path) -> list[str]:
    """Return the names of the linear layers inside the model's blocks, for example q_proj.

    Without a list vLLM would wrap the head too, and fail for a probe (vLLM 0.32): the wrapped head
    takes one row per request.
    """
    names = set()
    for file in model_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # not a mapping
                layer, _, leaf = name.rpartition(".")
                is_matrix = len(weights.get_slice(name).get_shape()) == 2
                # Blocks are numbered; embedding and head are outside them.
                is_inside = any(part.isdigit() for part in layer.split("."))
                if leaf == "weight" and is_matrix and is_inside:
                    names.add(layer.rpartition(".")[2])
    return sorted(names)


def _fetch_peft(manifest: Manifest, source: StoredFile, directory: Path) -> None:
    """Fetch an adapter and write it as PEFT does. Raises WeightsError if it does not match
    the manifest.
    """
    assert source.scaling is not None
    with opened(source, manifest) as file:
        content = file.read()
    found = checksum(content)
    if found != source.checksum:
        raise WeightsError(
            f"checksum of {source.url} is {found}, announced {source.checksum}; the file was"
            " changed after it was written"
        )
    write_peft(directory, content, source.scaling)
