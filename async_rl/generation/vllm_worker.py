"""The part of the weights' way that runs inside vLLM's workers: from the shared block into the model.

On CPU a linear layer's weights are packed for its kernel, so nothing can be copied in place: vLLM's layerwise reload materialises each
layer, loads it, packs it.  It leaves out an output head that shares its weights with the embedding; that one is packed again here.
Named to vLLM by `parallel_config.worker_extension_cls`; called through `collective_rpc` while the scheduler is paused.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_rl.codec import decode
from async_rl.errors import WeightsError
from async_rl.generation.environment import die_with_parent
from async_rl.generation.tensors import tensor_views
from async_rl.messages import Manifest
from async_rl.wire.shared_tensors import SharedTensorsReader

if multiprocessing.parent_process() is not None:
    # A worker process that vLLM started; one that survives its engine would hold the memory of a model.
    die_with_parent()


class SharedWeightsExtension:
    """Methods that vLLM adds to its worker class."""

    def load_shared_weights(self, manifest: bytes) -> float:
        """Loads every tensor of the encoded Manifest; the seconds it took. Raises WeightsError if the block changed meanwhile."""
        started_s = time.perf_counter()
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]  # of the worker this class is mixed into
        config = self.vllm_config  # type: ignore[attr-defined]
        with SharedTensorsReader(decode(manifest, Manifest)) as reader, set_current_vllm_config(config), torch.no_grad():
            _load(model, config.model_config, reader)
            reader.verify_unchanged()
        return time.perf_counter() - started_s


def _load(model: torch.nn.Module, model_config: object, reader: SharedTensorsReader) -> None:
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], set[str]] = model.load_weights  # type: ignore[assignment]
    loaded = load_weights(tensor_views(reader))
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    if missing := expected - loaded:
        raise WeightsError(f"{len(missing)} parameters got no weights, among them {min(missing)}; push all tensors of the model")
