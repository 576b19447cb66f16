"""Attention over packed rows, offered to every Hugging Face model through transformers' attention interface.

`use_segments(model)` makes a model call `_segment_attention`, which gathers the keys of each segment (its prompt, then itself), so a
prompt shared by several responses is computed once and no token is padded outside this function.
Invariant: the model receives the row's `Layout` as the keyword argument `segments` of its forward call and must pass it down.
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
    """From now on the model attends by the `segments` given to its forward call."""
    model.set_attn_implementation(_NAME)


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
    **_: Any,
) -> tuple[Tensor, None]:
    """query: [1, H, T, D]; key, value: [1, H_kv, T, D] -> [1, T, H, D]. Raises NotImplementedError for a sliding window."""
    if sliding_window is not None:
        raise NotImplementedError(f"layers with a sliding window of {sliding_window} tokens cannot be trained on packed rows")
    outputs = [_block_attention(block, query[0], key[0], value[0], scaling) for block in segments.blocks]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return joined.index_select(1, segments.output_index).transpose(0, 1)[None], None


def _block_attention(block: Block, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """query: [H, T, D]; key, value: [H_kv, T, D] -> [H, N * Q, D]."""

    def gather(x: Tensor, index: Tensor) -> Tensor:
        heads, _, size = x.shape
        return x.index_select(1, index).view(heads, block.num_segments, -1, size).transpose(0, 1)

    q, k, v = gather(query, block.query_index), gather(key, block.key_index), gather(value, block.key_index)
    bias = block.bias.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(0, 1).reshape(q.shape[1], -1, q.shape[3])


ALL_ATTENTION_FUNCTIONS.register(_NAME, _segment_attention)
