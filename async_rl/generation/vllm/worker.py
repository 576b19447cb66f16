"""The part of a push that runs inside vLLM's workers: from any medium into the model.

On CPU, linear layers have their weights packed for their kernel, so weights cannot be copied in
place. A second copy of the model is loaded and packed next to the one in use, then the two exchange
their tensors, which takes no longer than a few assignments; a failure before that leaves the model
in use untouched. Elsewhere addresses must not change (CUDA graphs): vLLM's layerwise reload writes
into the model in place. vLLM loads this class through `parallel_config.worker_extension_cls` and
calls it through `collective_rpc`.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from async_rl.core.codec import decode
from async_rl.core.errors import BroadcastBroken
from async_rl.core.os import die_with_parent
from async_rl.generation.environment import EXTERNAL_LIB
from async_rl.generation.vllm.changed_words import (
    change_words,
    has_plain_weights,
    layer_method,
    parameter_names,
    require_loaded,
)
from async_rl.generation.vllm.cpu import use_own_parts
from async_rl.protocol.weights import Manifest, Seat, Source
from async_rl.weights.receiving import Receivers
from async_rl.weights.tensors import Tensors

# The module is imported before the model is loaded.
use_own_parts()
if multiprocessing.parent_process() is not None:
    # A worker process that vLLM started: if it outlived its engine it would keep the memory of a
    # model.
    die_with_parent()
    if external_lib := os.environ.get(EXTERNAL_LIB):
        importlib.import_module(external_lib)


class SharedWeightsExtension:
    """Methods that vLLM adds to its worker class.

    Methods that load take an encoded Manifest and an encoded Source, and raise WeightsError for
    weights that do not fit. They return why a broadcast broke, else an empty string: an exception
    of a worker in another process would lose its type.

    vLLM mixes this class into its own and does not call `__init__`, so attributes are set by
    `prepare_shared_weights`.
    """

    # Attributes of vLLM's worker. Only annotations: vLLM refuses an extension that sets them too.
    vllm_config: VllmConfig
    rank: int
    device: torch.device
    distributed_init_method: str
    model_runner: Any
    _spare: SpareModel | None = None
    _receivers: Receivers
    _staged: Any

    def prepare_shared_weights(self, wants_spare: bool) -> bool:
        """Make the second copy where one is wanted and possible; returns whether there is one. Call
        it while no request runs: it changes torch's default dtype for a moment.
        """
        config = self.vllm_config
        if config.speculative_config is not None:
            # vLLM knows its own lookup only.
            from async_rl.generation.vllm.proposer import Proposer

            self.model_runner.drafter = Proposer(config, self.model_runner)
        self._receivers = Receivers(self.rank, self.device)
        meeting_point = self.distributed_init_method
        if config.parallel_config.world_size == 1 and meeting_point.startswith("file://"):
            # No other rank will come, and a killed process would leave the file behind.
            Path(meeting_point.removeprefix("file://")).unlink(missing_ok=True)
        is_cpu = config.device_config.device_type == "cpu"
        # On a CPU reading and packing take as long as many engine steps; with a second copy the
        # engine continues during that time. A GPU loads in place: a second model there would take
        # the memory of the KV cache.
        if wants_spare and is_cpu and config.quant_config is None:
            self._spare = SpareModel(self.model_runner.get_model(), config)
        return self._spare is not None

    def weight_device(self) -> str:
        """The device that receives weights in this rank."""
        return self._receivers.device_name

    def stage_shared_weights(self, manifest: bytes, source: bytes) -> str:
        """Load and pack the second copy; may run next to the engine's steps."""
        assert self._spare is not None, "the engine knows which workers have one"
        _return_freed_memory()
        try:
            with self._receivers.receive(*_decoded(manifest, source)) as tensors:
                self._spare.load(tensors)
        except BroadcastBroken as error:
            return str(error)
        self._spare.pack()
        return ""

    def exchange_shared_weights(self) -> str:
        """Put the staged weights into use; between two steps only."""
        assert self._spare is not None, "weights have been staged in it"
        self._spare.exchange()
        return ""

    def load_shared_weights(self, manifest: bytes, source: bytes) -> str:
        """Load the model; between two steps only. After a broken broadcast no step may follow until
        a load has succeeded.
        """
        config = self.vllm_config
        model: torch.nn.Module = self.model_runner.get_model()
        takes_changes = self.device.type != "cpu" and has_plain_weights(model)
        decoded, sent = _decoded(manifest, source)
        try:
            with (
                self._receivers.receive(decoded, sent, takes_changes=takes_changes) as tensors,
                set_current_vllm_config(config),
                torch.no_grad(),
            ):
                if isinstance(sent, Seat) and sent.difference:
                    change_words(model, decoded, tensors)
                    return ""
                if self.device.type == "cpu":
                    _forget_packed_experts(model)
                # The reload makes a separate parameter for a tied head, which no push names.
                tied = parameter_names(model, tied=True) - parameter_names(model)
                initialize_layerwise_reload(model)
                try:
                    _load_all(model, tensors, expected=parameter_names(model) - tied)
                finally:
                    # A retry needs whole layers, whatever their content.
                    finalize_layerwise_reload(model, config.model_config)
                for module in model.modules():
                    # The reload skips a head that shares its weights with the embedding.
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)
        except BroadcastBroken as error:
            return str(error)
        return ""

    def stage_adapter(self, slot: int, directory: str) -> str:
        """Read an adapter in PEFT's form for a slot, counted from 1; may run next to the engine's
        steps. Returns why vLLM refuses it, else an empty string.
        """
        request = LoRARequest(str(slot), slot, directory)
        try:
            # vLLM's own load in place does the same, here in two parts: the reading needs no pause.
            self._staged = self.model_runner.lora_manager._load_adapter(request)
        except (ValueError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def apply_adapter(self) -> str:
        """Put the staged adapter into its slot; between two steps only."""
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(self._staged.id)
        manager.add_adapter(self._staged)
        manager.activate_adapter(self._staged.id)
        # vLLM would make room for an adapter from a directory, and could not load this one again.
        manager.pin_adapter(self._staged.id)
        return ""


class SpareModel:
    """A second copy of the model, which exchanges its tensors with the one in use.

    Packing replaces a layer's parameter by an empty one and adds attributes to the layer (the
    kernel with its packed weights). `_unpacked` keeps, per layer, parameters that can be loaded; a
    parameter that is now in use unpacked is replaced by the one it was exchanged for.
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
        """Fill the spare copy; the one in use does not change."""
        # The last exchange left packed parameters here, which have no values to load into.
        for (_, theirs), unpacked in zip(self._pairs, self._unpacked, strict=True):
            theirs._parameters.update(unpacked)
        with torch.no_grad(), set_current_vllm_config(self._config):
            _load_all(self._model, tensors, expected=parameter_names(self._model))

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
            if isinstance(layer_method(ours), FusedMoEMethodBase):
                # It owns the kernel of the experts, which refers to their biases.
                ours.quant_method, theirs.quant_method = theirs.quant_method, ours.quant_method
            for name, parameter in unpacked.items():
                if ours._parameters[name] is parameter:
                    unpacked[name] = theirs._parameters[name]
        # Released now: a second set of packed weights would take as much memory as the model.
        self._packed = []


def _decoded(manifest: bytes, source: bytes) -> tuple[Manifest, Source]:
    kind: Any = Source  # a union, which mypy does not accept as a type
    return decode(manifest, Manifest), decode(source, kind)


def _return_freed_memory() -> None:
    """Return memory of earlier weights from malloc's arenas to the system.

    Each thread that stages has a separate arena, and small blocks between the weights, such as a
    kernel for each number of sequences, keep arenas from shrinking.
    """
    # glibc's, which vLLM's packages for CPUs need in any case.
    ctypes.CDLL(None).malloc_trim(0)


def _second_model(config: VllmConfig) -> torch.nn.Module:
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
    require_loaded(expected - loaded)


def _pack(layer: torch.nn.Module) -> dict[str, object]:
    """Prepare a loaded layer for its kernel; return the attributes that this added."""
    method = layer_method(layer)
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
        method = layer_method(layer)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None
