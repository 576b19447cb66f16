"""Adapters on a CPU: one product per adapter of a batch.

vLLM 0.32 copies the matrices of a token's adapter for every token, and takes the last slot's for a
token without adapter. Here the rows of each adapter are multiplied together, and tokens without
adapter stay as they are. `benchmarks/generation/lora_serving.py` measures it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


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


def use_grouped_adapters() -> None:
    """Let the models of this process that are loaded from now on use it, if it has no GPU."""
    if current_platform.is_cpu():
        name = f"{__name__}.{GroupedAdapters.__name__}"
        # The platform names the class.
        current_platform.get_punica_wrapper = lambda: name
