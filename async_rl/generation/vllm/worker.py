"""The part of this project that runs inside vLLM's workers: of a push, and on a CPU in the steps.

vLLM loads `SharedWeightsExtension` through `parallel_config.worker_extension_cls` and calls it
through `collective_rpc`. On a CPU a second copy of the model is loaded and packed next to the one
in use (model.py); a failure before they are exchanged leaves the model in use untouched. Elsewhere
the model is loaded in place.

vLLM 0.32 computes two things otherwise on a CPU.
- Adapters: it copies the matrices of a token's adapter for every token, and takes the last slot's
  for a token without adapter. Here the rows of each adapter are multiplied together, and tokens
  without adapter stay as they are. `benchmarks/generation/lora_serving.py` measures it.
- Drafts: it repeats the temperatures for the draft tokens as whole numbers: 0.7 becomes 0, so it
  draws from another distribution and reports log-probs that are 47 nats off, or NaN. With the same
  numbers repeated by torch, the log-probs of accepted, recovered and further tokens are exact.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from async_rl.core.codec import decode
from async_rl.core.errors import BroadcastBroken
from async_rl.core.os import die_with_parent
from async_rl.generation.environment import EXTERNAL_LIB
from async_rl.generation.vllm.model import SpareModel, change_words, has_plain_weights, reload
from async_rl.protocol.weights import Manifest, Seat, Source
from async_rl.weights.receiving import Receivers


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
                else:
                    reload(model, config, tensors)
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


class GroupedAdapters(PunicaWrapperCPU):
    """vLLM's interface to the products of adapters."""

    _rows: dict[int, Tensor | None]
    """The rows of the present batch for each slot that has some; None = all."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Note which adapter each row of the next batch has."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        found = slots.unique().tolist()
        self._rows = {
            slot: (slots == slot).nonzero().squeeze(1) if len(found) > 1 else None
            for slot in found
            if slot >= 0
        }

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """y += scale x A^T B^T, in place, for the columns of each part of a fused layer.

        y: [T, out]; x: [T, in]; A: [slots, 1, r, in]; B: [slots, 1, columns, r] of each part.
        """
        x = x.view(-1, x.shape[-1])
        parts = torch.split(y.view(-1, y.shape[-1]), list(output_slices), dim=1)
        for slot, rows in self._rows.items():
            own = x if rows is None else x[rows]
            for part, down, up in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
                hidden = own @ down[slot, 0].t()
                if rows is None:
                    part.addmm_(hidden, up[slot, 0].t(), alpha=scale)
                else:
                    part.index_add_(0, rows, hidden @ up[slot, 0].t(), alpha=scale)


def _expand(
    x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat the value of each request for its draft tokens: [B] -> [num_tokens], the same dtype.

    ends: int32 [B], where the tokens of each request end.  replace_from becomes replace_to.
    """
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(sizes)


# The module is imported before the model is loaded.
if current_platform.is_cpu():
    _own_products = f"{__name__}.{GroupedAdapters.__name__}"
    # The platform names the class.
    current_platform.get_punica_wrapper = lambda: _own_products
    rejection_sampler.expand_batch_to_tokens = _expand
if multiprocessing.parent_process() is not None:
    # A worker process that vLLM started: if it outlived its engine it would keep the memory of a
    # model.
    die_with_parent()
    if external_lib := os.environ.get(EXTERNAL_LIB):
        importlib.import_module(external_lib)
