"""Attention of a packed row on a CPU: torch's kernel for each segment, for a block of queries at a
time.

Invariant: memory is linear in the tokens of the row for any lengths, prompts and windows, because
a block has a bounded number of queries, and one with many keys gathers them again in the backward
pass.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from async_rl.batching.packing import Indices, seen_by

# More queries would need larger masks, fewer would gather keys more often.
_BLOCK_QUERIES = 512
# A block keeps its gathered keys for the backward pass if they are at most this many times its
# queries; any other block gathers them again and computes its attention twice.
_KEPT_SHARE = 4


class SegmentsPlan:
    """The attention of one packed row on a CPU."""

    def __init__(self, segments: Indices) -> None:
        self._lengths = segments[:, 1].tolist()
        self._seen = [torch.from_numpy(tokens) for tokens in seen_by(segments)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `attention.attend` of the row."""
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
