"""Attention over packed rows for every Hugging Face model, by transformers' attention interface.

`use_segments(model)` makes a model attend by a `Plan`, so that a prompt shared by several responses
is computed once. No device builds a mask of queries by keys.
Invariant: the model receives the row's plan as the keyword argument `segments` of its forward call
and must pass it on to its attention layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_rl.batching.packing import Indices
from async_rl.learner.attention_stages import PartsPlan
from async_rl.learner.attention_varlen import VarlenPlan

_NAME = "async_rl_segments"


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


def plan(segments: Indices, device: torch.device) -> Plan:
    """Return the plan of a row for the kernels of the device. segments: those of `Pass`."""
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
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            "its attention caps its logits or has sinks, which packed rows do not support"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return segments.attend(query, key, value, scaling, sliding_window)[None], None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _segment_attention)
