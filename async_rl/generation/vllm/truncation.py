"""top-k and top-p inside vLLM: exactly k tokens remain, also among equal logits.

vLLM keeps all tokens whose logit equals the k-th, which in bfloat16 are often several, and reports
k of them. So a record of the tokens that remained would be incomplete.

Written against vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from async_rl.batching.support import truncate


class Truncation(LogitsProcessor):
    """Applies top_k and top_p, which are extra arguments of a request, after the temperature."""

    def __init__(self, config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._supports: dict[int, tuple[int, float]] = {}

    def is_argmax_invariant(self) -> bool:
        """The likeliest token always remains."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their rows."""
        process_dict_updates(self._supports, batch_update, _support_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude tokens: float32 [B, V], in place."""
        for top_k, top_p in set(self._supports.values()):
            rows = [row for row, own in self._supports.items() if own == (top_k, top_p)]
            logits[rows] = truncate(logits[rows], top_k, top_p)
        return logits


def _support_of(params: Any, _: object, __: object) -> tuple[int, float] | None:
    # Numbers and not a Support, of which a core in another process would receive a dict.
    return (params.extra_args["top_k"], params.extra_args["top_p"]) if params.extra_args else None
