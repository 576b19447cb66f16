"""Attention of a packed row on a GPU: one kernel call for segments of any length, without a mask.

Each response has the keys of its prompt and its own in one piece; the kernels align the causal
triangle to the last query and last key. The backend is named, because torch's choice may be cuDNN,
which compiles a plan for each new shape.
"""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from async_rl.batching.packing import Indices

# The causal mask of the memory-efficient kernel that ends at the last query and key.
_FROM_BOTTOM_RIGHT = 2


class VarlenPlan:
    """The attention of one packed row. Nothing is built before a layer runs."""

    def __init__(self, segments: Indices, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        length, prefix = segments[:, 1], segments[:, 3]
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
        """The first query and the first key of each segment, and the ends: int32 [N + 1] each."""
        length, prefix = self._segments[:, 1], self._segments[:, 3]
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
