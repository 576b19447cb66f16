"""Attention over packed rows for every Hugging Face model, by transformers' attention interface.

`use_segments(model)` makes a model attend by a `Plan`, so that tokens shared by several sequences
are computed once. On a GPU one kernel call computes all segments, on a CPU one or more each.
Invariants
- The model receives the row's plan as the keyword argument `segments` of its forward call and must
  pass it on to its attention layers.
- No device builds a mask of all queries by all keys. On a CPU memory is linear in the tokens of the
  row for any lengths, prompts and windows, because a block has a bounded number of queries, and one
  with many keys gathers them again in the backward pass.
"""

import functools
import itertools
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_rl.batching.packing import Indices, seen_by

_NAME = "async_rl_segments"
# The causal mask of the memory-efficient kernel that is aligned to the last query and the last key.
_FROM_BOTTOM_RIGHT = 2
# More queries would need larger masks, fewer would gather keys more often.
_BLOCK_QUERIES = 512
# A block keeps its gathered keys for the backward pass if they are at most this many times its
# queries; any other block gathers them again and computes its attention twice.
_KEPT_SHARE = 4


def use_segments(model: PreTrainedModel) -> None:
    """Make the model attend by the `segments` passed to its forward call."""
    model.set_attn_implementation(_NAME)


class Plan(Protocol):
    """The attention of one packed row, which a forward pass builds and its layers share."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute softmax attention of each token to itself and to what it follows.

        query: float [T, H, D]; key, value: float [T, H_kv, D] -> float [T, H, D].  scaling: factor
        of the products, None = 1 / sqrt(D); window: the newest tokens that each token attends to,
        itself included, None = all (arXiv 1706.03762 eq. 1, grouped queries arXiv 2305.13245,
        windows arXiv 2310.06825 sec. 2).
        """


def plan(segments: Indices, device: torch.device) -> Plan:
    """Return the plan of a row for the kernels of the device. segments: as in `Pass`."""
    if device.type == "cpu":
        return SegmentsPlan(segments)
    return VarlenPlan(segments, device)


class SegmentsPlan:
    """The attention of one packed row on a CPU, for a block of queries at a time."""

    def __init__(self, segments: Indices) -> None:
        self._lengths = segments[:, 1].tolist()
        self._seen = [torch.from_numpy(tokens) for tokens in seen_by(segments)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `Plan.attend` of the row."""
        # A key is in several blocks, and sums of their gradients in bfloat16 would lose small
        # terms.
        wide = torch.promote_types(key.dtype, torch.float32)
        key = key.to(wide)
        value = value.to(wide)
        blocks = []
        for length, sequence in zip(self._lengths, self._seen, strict=True):
            for first in range(len(sequence) - length, len(sequence), _BLOCK_QUERIES):
                end = min(first + _BLOCK_QUERIES, len(sequence))
                oldest = 0 if window is None else max(0, first - window + 1)
                seen = sequence[oldest:end]
                attend = _attend
                if len(seen) > _KEPT_SHARE * (end - first):
                    # Otherwise a long response would keep its prompt's keys once per block.
                    attend = functools.partial(
                        checkpoint, _attend, use_reentrant=False, preserve_rng_state=False
                    )
                own = query.index_select(0, sequence[first:end])
                blocks.append(attend(own, key, value, seen, scaling, window))
        return torch.cat(blocks)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend from the tokens of a block, the last ones among the keys that it sees."""
    key, value = (x.index_select(0, seen).to(query.dtype) for x in (key, value))
    mask = None
    if len(query) < len(key) or (window is not None and window < len(key)):
        newest = torch.arange(len(key) - len(query), len(key))[:, None]
        age = newest - torch.arange(len(key))
        mask = age >= 0
        if window is not None:
            mask &= age < window
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        # The causal triangle of the kernel.
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


class VarlenPlan:
    """The attention of one packed row on a GPU.

    Each segment has the keys of what it follows and its own keys in one piece; the kernels align
    the causal triangle to the last query and the last key. The kernel is named, because torch may
    choose a kernel of cuDNN, which compiles a plan for each new shape.
    """

    def __init__(self, segments: Indices, device: torch.device) -> None:
        seen = seen_by(segments)
        sizes = segments[:, 1].tolist(), [len(tokens) for tokens in seen]
        # On the host: reading them from the device in each layer would wait for the GPU.
        self._max_queries, self._max_keys = map(max, sizes)
        # Here and not at the first use: a compiled layer takes them as they are.
        self._boundaries = tuple(
            torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32).to(device)
            for of in sizes
        )
        follows = (segments[:, 2] >= 0).any()
        self._key_index = torch.from_numpy(np.concatenate(seen)).to(device) if follows else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `Plan.attend` of the row."""
        if self._key_index is not None:
            key = key.index_select(0, self._key_index)
            value = value.index_select(0, self._key_index)
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
    width = value.shape[2]
    if width < key.shape[2]:
        # Latent attention (DeepSeek): the kernels of a GPU take keys and values of one width.
        value = nn.functional.pad(value, (0, key.shape[2] - width))
    attended = segments.attend(query, key, value, scaling, sliding_window)
    return attended[None, :, :, :width], None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _segment_attention)
