"""New weights in a model of vLLM: in a second copy of it, in place, or changed words only.

On CPU, linear layers have their weights packed for their kernel, so weights cannot be copied in
place. A second copy of the model is loaded and packed next to the one in use, then the two exchange
their tensors, which takes no longer than a few assignments. Elsewhere addresses must not change
(CUDA graphs): vLLM's layerwise reload writes into the model in place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from async_rl.core.errors import BroadcastBroken, WeightsError
from async_rl.core.sequences import divided
from async_rl.protocol.weights import Manifest
from async_rl.weights.tensors import Tensors, dtype_of, listed

_MARKED_BYTES = 512 << 20
"""Of tensors with marks at a time; a larger tensor goes alone."""


class SpareModel:
    """A second copy of the model, which exchanges its tensors with the one in use.

    Packing replaces a layer's parameter by an empty one and adds attributes to the layer (the
    kernel with its packed weights). `_unpacked` keeps, per layer, parameters that can be loaded; a
    parameter that is now in use unpacked is replaced by the one it was exchanged for.
    """

    def __init__(self, live: torch.nn.Module, config: VllmConfig) -> None:
        spare = second_model(config)
        pairs = zip(live.modules(), spare.modules(), strict=True)
        self._pairs = [(ours, theirs) for ours, theirs in pairs if theirs._parameters]
        self._model = spare
        self._config = config
        self._unpacked = [dict(theirs._parameters) for _, theirs in self._pairs]
        self._packed: list[dict[str, object]] = []

    def load(self, tensors: Tensors) -> None:
        """Fill the spare copy; the one in use does not change."""
        # The last exchange left packed parameters here, which have no values to load into.
        for (_, theirs), unpacked in zip(self._pairs, self._unpacked, strict=True):
            theirs._parameters.update(unpacked)
        with torch.no_grad(), set_current_vllm_config(self._config):
            _load_all(self._model, tensors, expected=_parameter_names(self._model))

    def pack(self) -> None:
        """Prepare the loaded tensors for the kernels."""
        with torch.no_grad(), set_current_vllm_config(self._config):
            self._packed = [_pack(theirs) for _, theirs in self._pairs]

    def exchange(self) -> None:
        """Swap the parameters of both copies; the one in use gets the kernels of the spare one."""
        for (ours, theirs), unpacked, packed in zip(
            self._pairs, self._unpacked, self._packed, strict=True
        ):
            ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
            ours.__dict__.update(packed)
            if isinstance(_layer_method(ours), FusedMoEMethodBase):
                # It owns the kernel of the experts, which refers to their biases.
                ours.quant_method, theirs.quant_method = theirs.quant_method, ours.quant_method
            for name, parameter in unpacked.items():
                if ours._parameters[name] is parameter:
                    unpacked[name] = theirs._parameters[name]
        # Released now: a second set of packed weights would take as much memory as the model.
        self._packed = []


def reload(model: torch.nn.Module, config: VllmConfig, tensors: Tensors) -> None:
    """Load all weights in place: their addresses do not change, as CUDA graphs need it. Call it
    without gradients, under the configuration.
    """
    if config.device_config.device_type == "cpu":
        _forget_packed_experts(model)
    # The reload makes a separate parameter for a tied head, which no push names.
    tied = _parameter_names(model, tied=True) - _parameter_names(model)
    initialize_layerwise_reload(model)
    try:
        _load_all(model, tensors, expected=_parameter_names(model) - tied)
    finally:
        # A retry needs whole layers, whatever their content.
        finalize_layerwise_reload(model, config.model_config)
    for module in model.modules():
        # The reload skips a head that shares its weights with the embedding.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def has_plain_weights(model: torch.nn.Module) -> bool:
    """Return whether the kernels read the words of the checkpoint, joined and divided at most.

    Experts and quantized layers have others, and MLA keeps products of them.
    """
    methods = (_layer_method(layer) for layer in model.modules())
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(
        isinstance(method, plain) or not isinstance(method, QuantizeMethodBase)
        for method in methods
    ) and not any(isinstance(layer, MLAAttention) for layer in model.modules())


def change_words(model: torch.nn.Module, manifest: Manifest, lists: Tensors) -> None:
    """Write changed words into a model that has the version before. lists: as in `Difference`.

    Raises BroadcastBroken if a layer cannot take single words; all weights must follow.
    """
    entries = {entry.name: entry for entry in manifest.tensors}

    def patches() -> Iterator[tuple[CheckpointWeightPatch, int]]:
        for name, changes in lists:
            entry = entries[name]
            dtype = dtype_of(entry)
            positions, words = listed(changes, entry.size_bytes // dtype.itemsize)
            patch = CheckpointWeightPatch(
                name, tuple(entry.shape), dtype, words.view(dtype), positions
            )
            yield patch, entry.size_bytes

    loaded: set[str] = set()
    try:
        # vLLM makes a whole tensor for each list, in which all other words are marked.
        for part in divided(patches(), _MARKED_BYTES):
            loaded |= load_checkpoint_weight_patches(model, part, validate_unique_indices=False)
    except NotImplementedError as error:
        raise BroadcastBroken(f"{type(model).__name__}: {error}") from error
    # A tied head shares the words of the embedding.
    _require_loaded(_parameter_names(model) - loaded)


def _require_loaded(missing: set[str]) -> None:
    """Raise WeightsError for parameters that got no weights."""
    if missing:
        raise WeightsError(
            f"{len(missing)} parameters got no weights, among them {min(missing)}; push all tensors"
            " of the model"
        )


def _parameter_names(model: torch.nn.Module, *, tied: bool = False) -> set[str]:
    """Return the names of the model's parameters; with `tied` also the names of shared ones."""
    return {name for name, _ in model.named_parameters(remove_duplicate=not tied)}


def _layer_method(layer: torch.nn.Module) -> object:
    """Return the object that prepares and runs the layer's weights: an attribute, or a submodule
    (experts).
    """
    return layer._modules.get("quant_method", layer.__dict__.get("quant_method"))


def second_model(config: VllmConfig) -> torch.nn.Module:
    """Build the same model again. Its attention layers stay out of the engine's list of layers."""
    # A shallow copy: only the table of attention layers must differ.
    config = copy.copy(config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with (
        set_default_torch_dtype(config.model_config.dtype),
        torch.device(config.device_config.device),
    ):
        model: torch.nn.Module = initialize_model(vllm_config=config)
    return model


def _load_all(model: torch.nn.Module, tensors: Tensors, *, expected: set[str]) -> None:
    # A tensor that no push names would keep its random values without an error.
    loadable: Any = model
    loaded: set[str] = loadable.load_weights(tensors)
    _require_loaded(expected - loaded)


def _pack(layer: torch.nn.Module) -> dict[str, object]:
    """Prepare a loaded layer for its kernel; return the attributes that this added."""
    method = _layer_method(layer)
    if not isinstance(method, QuantizeMethodBase):
        return {}
    _forget_packed_experts(layer)
    before = dict(layer.__dict__)
    method.process_weights_after_loading(layer)
    return {
        name: value
        for name, value in layer.__dict__.items()
        if value is not before.get(name) and name != "_parameters"
    }


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Let vLLM pack the experts' next weights. vLLM 0.32 packs them only when it makes their
    kernel, so on a CPU later weights would be read unpacked, with log-probs that are 5 nats off.
    """
    for layer in model.modules():
        method = _layer_method(layer)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None
