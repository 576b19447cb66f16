"""top-k and top-p inside vLLM: exactly k tokens remain, also among equal logits.

vLLM keeps all tokens whose logit equals the k-th, which in bfloat16 are often several, and reports
k of them. So a record of the tokens that remained would be incomplete.

Written against vLLM 0.32.
"""

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from async_rl.batching.support import truncate

LIMITS = "limits"
"""Extra argument of a request: top_k and top_p."""


class Truncation(LogitsProcessor):
    """Applies the limits of a request after the temperature."""

    def __init__(self, *_: object) -> None:
        self._limits: dict[int, tuple[int, float]] = {}

    def is_argmax_invariant(self) -> bool:
        """The likeliest token always remains."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their rows."""
        process_dict_updates(
            self._limits,
            batch_update,
            lambda params, *_: (params.extra_args or {}).get(LIMITS),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude tokens: float32 [B, V], in place."""
        for limits in set(self._limits.values()):
            rows = [row for row, own in self._limits.items() if own == limits]
            logits[rows] = truncate(logits[rows], *limits)
        return logits
