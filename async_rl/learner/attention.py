"""Attention over packed rows for every Hugging Face model, by transformers' attention interface.

`use_segments(model)` makes a model call `attend`, which gathers the keys of each segment: its
prompt, then itself. So a prompt shared by several responses is computed once, and only this file
pads tokens.
Invariant: the model receives the row's `Layout` as the keyword argument `segments` of its forward
call and must pass it on to its attention layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_rl.batching.packing import Block, Layout

_NAME = "async_rl_segments"


def use_segments(model: PreTrainedModel) -> None:
    """Make the model attend by the `segments` passed to its forward call."""
    model.set_attn_implementation(_NAME)


def attend(
    segments: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """Compute softmax attention of each segment to its prompt and its own past.

    query: float [T, H, D]; key, value: float [T, H_kv, D] -> float [T, H, D].  scaling: factor of
    the products, None = 1 / sqrt(D); window: the newest tokens that each token attends to, itself
    included, None = all (arXiv 1706.03762 eq. 1, grouped queries arXiv 2305.13245).
    """
    outputs = [
        _attend_block(block, query, key, value, scaling, window) for block in segments.blocks
    ]
    # A concatenation of one tensor would still copy it.
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, segments.output_index).view(query.shape)


def _attend_block(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Float [N * Q, H * D]."""

    def gather(x: Tensor, index: Tensor) -> Tensor:
        gathered = x.flatten(1).index_select(0, index)
        return gathered.view(block.num_segments, -1, *x.shape[1:]).transpose(1, 2)

    q = gather(query, block.query_index)
    k, v = gather(key, block.key_index), gather(value, block.key_index)
    bias = block.bias if window is None else block.windowed_bias(window)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if bias is None else bias.to(q.dtype),
        is_causal=bias is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).reshape(len(block.query_index), -1)


def _segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Adapt `attend` to transformers: [1, H, T, D], [1, H_kv, T, D] -> [1, T, H, D].

    Raises NotImplementedError for attention that computes something else.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            "its attention caps its logits or has sinks, which packed rows do not support"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(segments, query, key, value, scaling, sliding_window)[None], None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _segment_attention)
