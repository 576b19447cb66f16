"""LoRA adapters inside a model, as a value, and as PEFT's files: W + alpha / rank * B A in place of
W, for chosen linear layers (arXiv 2106.09685 eq. 3).

Invariants
- Base weights are frozen. B is 0 at first, so an adapter starts as the model itself.
- A model may have several adapters, of different rank and for different layers; a pass computes one
  of them.
- `merged_weights` has the names and shapes of the model without adapter; `adapter_weights` has the
  names and shapes of PEFT's files, which vLLM reads too.
PEFT is imported only for a model with an adapter: importing it takes seconds.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.config.generation import LoraAdapter, ModelConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen

_ONLY = "default"
"""The adapter of a model with one."""
_PREFIX = "base_model.model."


@frozen
class Adapter:
    """One version of an adapter. tensors: whole, float32, with the names of PEFT's files."""

    tensors: Mapping[str, Tensor]
    scaling: float

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the tensors."""
        content: bytes = save(dict(self.tensors), {"format": "pt"})
        return content


def add_adapter(
    lm: Any, config: LoraAdapter, name: str = _ONLY, *, seed: int | None = None
) -> None:
    """Freeze a transformers model and add an adapter to it in place.

    seed: of its numbers, which are then equal on every machine and next to any other adapters;
    None = they continue torch's random state.  Raises ConfigError for a target that the model
    lacks, or a rank above a side of a matrix.
    """
    sizes: dict[str, int] = {}
    for _, leaf, module in _linears(lm):
        # One name may stand for layers of several sizes, and the rank must fit the smallest.
        sizes[leaf] = min(*module.weight.shape, sizes.get(leaf, 1 << 30))
    targets = config.targets or sorted(sizes)
    if unknown := sorted(set(targets) - sizes.keys()):
        raise ConfigError(
            f"model.lora.targets={config.targets}: the model has no linear layer {unknown[0]}; it"
            f" has {', '.join(sorted(sizes))}"
        )
    # One rank for all layers, so the smallest layer bounds it.
    smallest = min(targets, key=lambda name: sizes[name])
    if config.rank > sizes[smallest]:
        raise ConfigError(
            f"model.lora.rank={config.rank}: a matrix of {smallest} has a side of"
            f" {sizes[smallest]}; lower the rank to at most that"
        )
    from peft import LoraConfig, inject_adapter_in_model

    described = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    # The record of the adapter before: PEFT would warn that there will be two.
    vars(lm).pop("peft_config", None)
    inject_adapter_in_model(described, lm, adapter_name=name)
    # After PEFT, whose numbers are drawn on the device of the base.
    if seed is not None:
        torch.manual_seed(seed)
    # PEFT moves an adapter to the device of its base, which is the meta device before a model is
    # sharded. Drawn again for every model, so that the numbers do not depend on the device.
    for layer in _adapted(lm):
        if name not in layer.lora_A:
            continue
        for side in (layer.lora_A, layer.lora_B):
            empty = side[name]
            side[name] = nn.Linear(empty.in_features, empty.out_features, bias=False)
        layer.reset_lora_parameters(name, init_lora_weights=True)


def use_adapter(lm: nn.Module, name: str) -> None:
    """Let the next passes compute this adapter, and so train it alone."""
    for layer in _adapted(lm):
        # PEFT's own switch also changes requires_grad, layer by layer.
        layer._active_adapter = [name]


def remove_adapter(lm: nn.Module, name: str) -> None:
    """Free an adapter; the next pass needs `use_adapter` first."""
    for layer in _adapted(lm):
        layer._active_adapter = []
        layer.delete_adapter(name)


@contextlib.contextmanager
def without_adapter(lm: nn.Module) -> Iterator[None]:
    """Compute the base model inside the block."""
    layers = list(_adapted(lm))
    # PEFT's own switch also changes requires_grad, which FSDP reads once at the first forward pass.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merged_weights(lm: nn.Module, name: str = _ONLY) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model that base and adapter make together (collective).

    Every matrix is sharded as its base weight is.
    """
    for key, parameter in lm.named_parameters():
        if ".lora_" in key:
            continue
        owner, is_adapted, leaf = key.rpartition(".base_layer.")
        if not is_adapted:
            yield key, parameter
            continue
        layer: Any = lm.get_submodule(owner)
        weight: Tensor = parameter
        if leaf == "weight" and name in layer.lora_A:
            weight = _merged(layer, parameter, name)
        yield f"{owner}.{leaf}", weight


def _merged(layer: Any, weight: Tensor, name: str) -> Tensor:
    """W + scaling B A by the rows of this rank: W and B are divided alike, and A is small."""
    down = layer.lora_A[name].weight
    up = layer.lora_B[name].weight
    scaling = layer.scaling[name]
    if not isinstance(weight, DTensor):
        return torch.addmm(weight.to(up.dtype), up, down, alpha=scaling)
    return DTensor.from_local(
        torch.addmm(weight.to_local(), up.to_local(), down.full_tensor(), alpha=scaling),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def adapter_weights(lm: nn.Module, name: str = _ONLY) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapter's parameters with their names in PEFT's files."""
    for key, parameter in lm.named_parameters():
        if ".lora_" in key and f".{name}." in key:
            yield _PREFIX + key.replace(f".{name}.", "."), parameter


@torch.no_grad()
def whole_adapter(lm: nn.Module, config: ModelConfig) -> Adapter | None:
    """Copy the adapter to main memory; None without one (collective)."""
    if config.adapter is None:
        return None
    tensors = {}
    for name, parameter in adapter_weights(lm):
        # A copy: the next step changes the parameters while the file is still written.
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        tensors[name] = whole.to("cpu", copy=True).contiguous()
    return Adapter(tensors=tensors, scaling=config.adapter.alpha / config.adapter.rank)


def write_peft(directory: Path, content: bytes, scaling: float, **facts: str | None) -> None:
    """Write the file of an adapter as PEFT's directory. facts: further fields of PEFT's
    configuration.
    """
    downs = {name: x for name, x in load(content).items() if name.endswith(".lora_A.weight")}
    rank = next(iter(downs.values())).shape[0]
    described = {
        "peft_type": "LORA",
        "r": rank,
        # PEFT's form has no scaling; its readers compute it as lora_alpha / r.
        "lora_alpha": round(scaling * rank),
        # For example base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.
        "target_modules": sorted({name.split(".")[-3] for name in downs}),
        **facts,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(described))
    (directory / "adapter_model.safetensors").write_bytes(content)


def _adapted(lm: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in lm.modules() if isinstance(module, LoraLayer))


def targets_of(lm: Any, *, attention: bool, mlp: bool) -> list[str]:
    """Return the names of the linear layers of attention, of the other part of a block, or of both;
    never the output head.
    """
    # For example model.layers.0.self_attn of q_proj.
    kinds = ((leaf, "attn" in owner or "attention" in owner) for owner, leaf, _ in _linears(lm))
    return sorted({leaf for leaf, is_attention in kinds if (attention if is_attention else mlp)})


def _linears(lm: Any) -> Iterator[tuple[str, str, nn.Linear]]:
    """Yield the last name of the owner, the name and the module of every linear layer, as they are
    without adapters.
    """
    head = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in name:
            owner, _, leaf = name.removesuffix(".base_layer").rpartition(".")
            yield owner.rpartition(".")[2], leaf, module
