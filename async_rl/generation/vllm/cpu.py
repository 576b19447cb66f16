"""What vLLM 0.32 computes otherwise on a CPU: adapters, and the temperatures of drafts.

Adapters: it copies the matrices of a token's adapter for every token, and takes the last slot's
for a token without adapter. Here the rows of each adapter are multiplied together, and tokens
without adapter stay as they are. `benchmarks/generation/lora_serving.py` measures it.

Drafts: it repeats the temperatures for the draft tokens as whole numbers: 0.7 becomes 0, so it
draws from another distribution and reports log-probs that are 47 nats off, or NaN. With the same
numbers repeated by torch, the log-probs of accepted, recovered and further tokens are exact.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


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


def expand(
    x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat the value of each request for its draft tokens: [B] -> [num_tokens], the same dtype.

    ends: int32 [B], where the tokens of each request end.  replace_from becomes replace_to.
    """
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(sizes)


def use_own_parts() -> None:
    """Let the models of this process that are loaded from now on use both, if it has no GPU."""
    if current_platform.is_cpu():
        name = f"{__name__}.{GroupedAdapters.__name__}"
        # The platform names the class.
        current_platform.get_punica_wrapper = lambda: name
        rejection_sampler.expand_batch_to_tokens = expand
