"""The part of the weights' way that runs inside vLLM's workers: from the shared block, a broadcast,
or memory of the GPU, into the model.

On CPU, linear layers hold their weights packed for their kernel, so nothing can be copied in place.
A second copy of the model is loaded and packed beside the one that writes, then the two exchange
their tensors, which takes no longer than a few assignments; what fails before leaves the running
model untouched.  Elsewhere addresses must stay (CUDA graphs): vLLM's layerwise reload writes into
the model in place. Named to vLLM by `parallel_config.worker_extension_cls`; called through
`collective_rpc`.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import os
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from async_rl.core.codec import decode
from async_rl.core.errors import BroadcastBroken, WeightsError
from async_rl.core.os import die_with_parent
from async_rl.generation.environment import EXTERNAL_LIB
from async_rl.protocol.weights import Manifest, Source
from async_rl.weights.transport.base import Tensors
from async_rl.weights.transport.table import Receivers

if multiprocessing.parent_process() is not None:
    # A worker process that vLLM started; one that survives its engine would hold the memory of a
    # model.
    die_with_parent()
    if external_lib := os.environ.get(EXTERNAL_LIB):
        importlib.import_module(external_lib)


class SharedWeightsExtension:
    """Methods that vLLM adds to its worker class.

    Those that load take an encoded Manifest and an encoded Source (empty = the shared block), and
    raise WeightsError for weights that do not fit.  They return why a broadcast broke, else
    nothing: an exception of a worker in another process would lose its type.
    """

    _spare: SpareModel | None = None
    _receivers: Receivers

    def prepare_shared_weights(self) -> None:
        """Makes the second copy where there will be one. Call it while nothing runs: it changes
        torch's default dtype for a moment.
        """
        config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]  # of the worker this class is mixed into
        self._receivers = Receivers(self.rank, self.device)  # type: ignore[attr-defined]
        meeting_point: str = self.distributed_init_method  # type: ignore[attr-defined]
        if config.parallel_config.world_size == 1 and meeting_point.startswith("file://"):
            # Nobody else will come; a killed process would leave the file behind.
            Path(meeting_point.removeprefix("file://")).unlink(missing_ok=True)
        if config.device_config.device_type == "cpu" and config.quant_config is None:
            self._spare = SpareModel(self.model_runner.get_model(), config)  # type: ignore[attr-defined]

    def weight_device(self) -> str:
        """What receives weights in this rank."""
        return self._receivers.device_name

    def stage_shared_weights(self, manifest: bytes, source: bytes) -> str:
        """Loads and packs the second copy; may run beside the engine's steps."""
        if self._spare is None:
            raise WeightsError("this worker has no second copy of the model to stage weights in")
        try:
            with self._weights(manifest, source) as tensors:
                self._spare.load(tensors)
        except BroadcastBroken as error:
            return str(error)
        self._spare.pack()
        return ""

    def exchange_shared_weights(self) -> None:
        """The staged weights go live; between two steps only."""
        if self._spare is not None:
            self._spare.exchange()

    def load_shared_weights(self, manifest: bytes, source: bytes) -> str:
        """Loads the model at once; between two steps only. After a broken broadcast no step may
        follow until a load succeeded.
        """
        if self._spare is not None:
            if not (broken := self.stage_shared_weights(manifest, source)):
                self.exchange_shared_weights()
            return broken
        config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        try:
            with (
                self._weights(manifest, source) as tensors,
                set_current_vllm_config(config),
                torch.no_grad(),
            ):
                initialize_layerwise_reload(model)
                try:
                    _load_all(model, tensors)
                finally:  # a repetition needs the layers whole, whatever is in them
                    finalize_layerwise_reload(model, config.model_config)
                for module in model.modules():
                    # The reload leaves out a head that shares its weights with the embedding.
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)
        except BroadcastBroken as error:
            return str(error)
        return ""

    def _weights(self, manifest: bytes, source: bytes) -> AbstractContextManager[Tensors]:
        """As Receiver.receive."""
        place: Source = decode(source, Source)  # type: ignore[arg-type]  # a union is no type
        return self._receivers.receive(decode(manifest, Manifest), place)


class SpareModel:
    """A second copy of the model, whose tensors are exchanged with those of the live one.

    Packing replaces a layer's parameter by an empty one and adds attributes to the layer (the
    kernel with the packed weights in it). `_unpacked` keeps, per layer, parameters that can be
    loaded; those that went live unpacked are replaced by the ones they relieved.
    """

    def __init__(self, live: torch.nn.Module, config: VllmConfig) -> None:
        spare = _second_model(config)
        pairs = zip(live.modules(), spare.modules(), strict=True)
        self._pairs = [(ours, theirs) for ours, theirs in pairs if theirs._parameters]
        self._model = spare
        self._config = config
        self._unpacked = [dict(theirs._parameters) for _, theirs in self._pairs]
        self._packed: list[dict[str, object]] = []

    def load(self, tensors: Tensors) -> None:
        """Fills the spare copy; the live one is not touched."""
        for (_, theirs), unpacked in zip(self._pairs, self._unpacked, strict=True):
            theirs._parameters.update(unpacked)
        with torch.no_grad(), set_current_vllm_config(self._config):
            _load_all(self._model, tensors)

    def pack(self) -> None:
        """Prepares what was loaded for the kernels."""
        with torch.no_grad(), set_current_vllm_config(self._config):
            self._packed = [_pack(theirs) for _, theirs in self._pairs]

    def exchange(self) -> None:
        """Live and spare copy swap their parameters; the live one gets the kernels of the spare
        one.
        """
        for (ours, theirs), unpacked, packed in zip(
            self._pairs, self._unpacked, self._packed, strict=True
        ):
            ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
            ours.__dict__.update(packed)
            for name, parameter in unpacked.items():
                if ours._parameters[name] is parameter:
                    unpacked[name] = theirs._parameters[name]
        self._packed = []


def _second_model(config: VllmConfig) -> torch.nn.Module:
    """The same model once more, its attention layers kept out of the list in which the engine finds
    those of the live one.
    """
    config = copy.copy(config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with (
        set_default_torch_dtype(config.model_config.dtype),
        torch.device(config.device_config.device),
    ):
        model: torch.nn.Module = initialize_model(vllm_config=config)
    return model


def _load_all(model: torch.nn.Module, tensors: Tensors) -> None:
    expected = {name for name, _ in model.named_parameters()}
    loaded: set[str] = model.load_weights(tensors)  # type: ignore[operator]
    if missing := expected - loaded:
        raise WeightsError(
            f"{len(missing)} parameters got no weights, among them {min(missing)}; push all tensors"
            " of the model"
        )


def _pack(layer: torch.nn.Module) -> dict[str, object]:
    """Prepares a loaded layer for its kernel; returns the attributes that this gave it."""
    method = layer.__dict__.get("quant_method")
    if not isinstance(method, QuantizeMethodBase):
        return {}
    before = dict(layer.__dict__)
    method.process_weights_after_loading(layer)
    return {
        name: value
        for name, value in layer.__dict__.items()
        if value is not before.get(name) and name != "_parameters"
    }
