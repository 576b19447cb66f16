"""Changed words into a model of vLLM that is in use, and what a model's layers say about that."""

from collections.abc import Iterator

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from async_rl.core.errors import BroadcastBroken, WeightsError
from async_rl.core.sequences import divided
from async_rl.protocol.weights import Manifest
from async_rl.weights.tensors import Tensors, dtype_of, listed

_MARKED_BYTES = 512 << 20
"""Of tensors with marks at a time; a larger tensor goes alone."""


def has_plain_weights(model: torch.nn.Module) -> bool:
    """Return whether the kernels read the words of the checkpoint, joined and divided at most.

    Experts and quantized layers have others, and MLA keeps products of them.
    """
    methods = (layer_method(layer) for layer in model.modules())
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
    require_loaded(parameter_names(model) - loaded)


def require_loaded(missing: set[str]) -> None:
    """Raise WeightsError for parameters that got no weights."""
    if missing:
        raise WeightsError(
            f"{len(missing)} parameters got no weights, among them {min(missing)}; push all tensors"
            " of the model"
        )


def parameter_names(model: torch.nn.Module, *, tied: bool = False) -> set[str]:
    """Return the names of the model's parameters; with `tied` also the names of shared ones."""
    return {name for name, _ in model.named_parameters(remove_duplicate=not tied)}


def layer_method(layer: torch.nn.Module) -> object:
    """Return the object that prepares and runs the layer's weights: an attribute, or a submodule
    (experts).
    """
    return layer._modules.get("quant_method", layer.__dict__.get("quant_method"))
