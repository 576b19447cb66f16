"""Compiles the decoder blocks of a model for a GPU.

A block that runs eagerly launches four times as many kernels, which read and write the same
activations again and again (docs/decisions/compiled_learner.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from async_rl.algorithms.compiling import Compilation


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make the blocks compile at their first call; they may be sharded already.

    A block that is divided into several units of FSDP, or that has experts, is left as it is.
    """
    compilation = Compilation()
    for block in blocks:
        # Experts get tokens by the values of a router, which a graph cannot; their matrices are
        # stacked in one tensor.
        has_experts = any(p.ndim > 2 for p in block.parameters())
        is_divided = any(isinstance(m, FSDPModule) for m in block.modules() if m is not block)
        if not has_experts and not is_divided:
            # Not the module: the hooks of FSDP and of checkpointing stay outside of the graph.
            block.forward = compilation.of(block.forward)
