"""Adapters of a small random model, and the models that they make of it."""

import functools
import zlib
from typing import Any

import numpy as np
import torch
from generation_support import with_weights

RANK, SCALING = 8, 2.0
SLOTS = 6
PROMPT = np.arange(20, 32, dtype=np.int32)
"""Of the samples of a service."""
_PREFIX = "base_model.model."


def adapter_of(
    model: Any, policy: str, version: int, *, rank: int = RANK
) -> dict[str, torch.Tensor]:
    """The adapter of a version of a policy under the names of PEFT's files."""
    noise = torch.Generator().manual_seed(zlib.crc32(f"{policy} {version}".encode()))
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            down = 0.1 * torch.randn(rank, module.in_features, generator=noise)
            up = 0.1 * torch.randn(module.out_features, rank, generator=noise)
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = down
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = up
    return tensors


@functools.cache
def merged_model(model: Any, policy: str, version: int, *, rank: int = RANK) -> Any:
    """A model with base weights and adapter in one."""
    tensors = adapter_of(model, policy, version, rank=rank)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in state:
        layer = _PREFIX + name.removesuffix("weight")
        if layer + "lora_A.weight" in tensors:
            up, down = tensors[layer + "lora_B.weight"], tensors[layer + "lora_A.weight"]
            state[name] += SCALING * (up @ down)
    return with_weights(model, state)
