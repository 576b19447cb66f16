"""Push the weights of a model's directory to an engine that has no learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from async_rl.config.generation import ModelConfig
from async_rl.protocol.weights import Manifest
from async_rl.weights.block import SharedTensors, tensor_spec


@contextmanager
def published(path: Path, model: ModelConfig, version: int) -> Iterator[Manifest]:
    """Share all parameters of the model, tied ones once, with engines of this host inside the
    block.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=getattr(torch, model.dtype),
        trust_remote_code=model.trust_remote_code,
        local_files_only=True,
    )
    parameters = dict(loaded.named_parameters())
    specs = [tensor_spec(name, tensor) for name, tensor in parameters.items()]
    with SharedTensors(specs) as block:
        yield block.write(version, parameters.values())
