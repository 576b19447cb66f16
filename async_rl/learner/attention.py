"""Attention over packed rows for every Hugging Face model, by transformers' attention interface.

`use_segments(model)` makes a model attend by a `Plan`, so that a prompt shared by several responses
is computed once. No device builds a mask of queries by keys. On a GPU this file runs one kernel
call for all segments; on a CPU cpu_attention.py plans the calls.
Invariant: the model receives the row's plan as the keyword argument `segments` of its forward call
and must pass it on to its attention layers.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_rl.batching.packing import Indices
from async_rl.learner.cpu_attention import PartsPlan

_NAME = "async_rl_segments"
# The causal mask of the memory-efficient kernel that is aligned to the last query and the last key.
_FROM_BOTTOM_RIGHT = 2


def use_segments(model: PreTrainedModel) -> None:
    """Make the model attend by the `segments` passed to its forward call."""
    model.set_attn_implementation(_NAME)


class Plan(Protocol):
    """The attention of one packed row, which a forward pass builds and its layers share."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute softmax attention of each segment to its shared prompt and its own past.

        query: float [T, H, D]; key, value: float [T, H_kv, D] -> float [T, H, D].  scaling: factor
        of the products, None = 1 / sqrt(D); window: the newest tokens that each token attends to,
        itself included, None = all (arXiv 1706.03762 eq. 1, grouped queries arXiv 2305.13245,
        windows arXiv 2310.06825 sec. 2).
        """


class VarlenPlan:
    """The attention of one packed row on a GPU. Nothing is built before a layer runs.

    Each response has the keys of its prompt and its own keys in one piece; the kernels align the
    causal triangle to the last query and the last key. The kernel is named, because torch
    may choose a kernel of cuDNN, which compiles a plan for each new shape.
    """

    def __init__(self, segments: Indices, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        length = segments[:, 1]
        prefix = segments[:, 3]
        # On the host: reading them from the device in each layer would wait for the GPU.
        self._max_queries = int(length.max())
        self._max_keys = int((length + prefix).max())
        self._shares_prompts = bool(prefix.any())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `attention.attend` of the row."""
        if self._shares_prompts:
            key, value = (x.index_select(0, self._key_index) for x in (key, value))
        queries, keys = self._boundaries
        # The kernel of float32 takes as many key heads as query heads.
        if query.dtype is torch.float32:
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            # Flash kernels have no float32.
            float_out: Tensor = torch.ops.aten._efficient_attention_forward(
                query[None],
                key[None],
                value[None],
                None,
                queries,
                keys,
                self._max_queries,
                self._max_keys,
                0.0,
                _FROM_BOTTOM_RIGHT,
                True,
                scale=scaling,
                window_size=window,
            )[0][0]
            return float_out
        out: Tensor = varlen_attn(  # type: ignore[assignment]
            query,
            key,
            value,
            queries,
            keys,
            self._max_queries,
            self._max_keys,
            scale=scaling,
            # Keys to the left of the token itself; -1 = all.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    @cached_property
    def _boundaries(self) -> tuple[Tensor, Tensor]:
        """The first query and the first key of each segment, and the totals: int32 [N + 1] each."""
        length = self._segments[:, 1]
        prefix = self._segments[:, 3]
        ends = ([0, *itertools.accumulate(sizes.tolist())] for sizes in (length, length + prefix))
        queries, keys = (torch.tensor(x, dtype=torch.int32, device=self._device) for x in ends)
        return queries, keys

    @cached_property
    def _key_index(self) -> Tensor:
        """The token of each key: the shared prompt's, then the segment's own."""
        pieces = [
            np.arange(first, first + size)
            for start, length, prefix_start, prefix in self._segments.tolist()
            for first, size in ((prefix_start, prefix), (start, length))
        ]
        return torch.from_numpy(np.concatenate(pieces)).to(self._device)


def plan(segments: Indices, device: torch.device) -> Plan:
    """Return the plan of a row for the kernels of the device. segments: as in `Pass`."""
    return PartsPlan(segments, device) if device.type == "cpu" else VarlenPlan(segments, device)


def _segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Plan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Adapt `Plan.attend` to transformers: [1, H, T, D], [1, H_kv, T, D] -> [1, T, H, D].

    Raises NotImplementedError for attention that computes something else.
    """
    # Refused and not ignored: the check of loading.py would report only a difference.
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            "its attention caps its logits or has sinks, which packed rows do not support"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return segments.attend(query, key, value, scaling, sliding_window)[None], None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _segment_attention)
