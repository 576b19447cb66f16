"""Settings of the learner pool: batches, memory, optimizer.

Part of the schema in `run.py`, whose invariants hold here.
"""

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Word,
)


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat
    """peak learning rate"""
    weight_decay: NonNegativeFloat
    """decoupled weight decay"""
    # A file of YAML has lists only, which a strict tuple would refuse.
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)]
    """AdamW's moment decays"""
    eps: PositiveFloat
    """AdamW's epsilon"""
    warmup_steps: NonNegativeInt
    """learner steps of linear warm-up; the first step has lr / warmup_steps, never 0"""
    schedule: Literal["constant", "cosine"]
    """learning rate after the warm-up"""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)]
    """smallest learning rate of the cosine schedule, as a share of lr"""
    schedule_span: Annotated[list[float], Field(max_length=2)]
    """first and last step of the cosine; empty = the end of the warm-up, and num_steps"""
    grad_clip: PositiveFloat
    """largest global norm of the gradient"""


# The learner obeys these numbers, and async_rl/planning/ estimates memory with them.
CPU_LOGITS_MB = 16.0
_GPU_LOGITS_MB = 512.0
CACHE_TOKENS = 1280
"""Tokens of a pass of one rank on a CPU: the activations of a small model then stay in the core's
cache, which is faster than one large pass.
"""
MOMENTS_PIECE_BYTES = 256 << 20
"""Bytes of offloaded moments that move to the GPU together. A piece must be so large that a copy
reaches the rate of the bus, and small because it takes memory of the GPU.
"""


_COPIED_PARAMETERS = 1.25e9
"""Parameters of a rank that has a node's share of a model: 20 GB with gradients and moments."""


def shard_ranks(num_parameters: int, *, ranks: int, node_ranks: int) -> int:
    """Return among how many of the ranks a model is divided: all, or, if the model is small for a
    node, those of a node; each node then has a copy, and only gradients pass between nodes.
    """
    is_small = num_parameters <= node_ranks * _COPIED_PARAMETERS
    if is_small and 0 < node_ranks < ranks and not ranks % node_ranks:
        return node_ranks
    return ranks


class LearnerConfig(Section):
    """The learner pool."""

    ranks: PositiveInt
    """number of FSDP2 ranks"""
    context_ranks: PositiveInt
    """ranks that compute each sequence together, each a piece of its tokens (context
    parallelism); affects memory, not the gradient"""
    cores: list[int]
    """numbers of the CPU cores for the ranks, assigned in turn; empty = all"""
    gpus_each: NonNegativeFloat
    """GPUs per rank"""
    minibatches: PositiveInt
    """optimizer updates per batch and epoch"""
    epochs: PositiveInt
    """passes over each batch"""
    budget_tokens: PositiveInt
    """packed tokens of one forward and backward pass on each rank; affects memory, not the
    gradient"""
    forward_budget_tokens: PositiveInt | None
    """packed tokens of one pass without a gradient (log-probs, reference, values); null =
    budget_tokens"""
    gradient_checkpointing: bool
    """recompute activations in the backward pass, to save memory"""
    shard_units: NonNegativeInt | list[Word]
    """modules that FSDP gathers separately: names of their classes, or their least number of
    parameters; 0 = the blocks that the model must not split"""
    offload: Literal["none", "optimizer", "parameters"]
    """keep in host memory while not in use: AdamW's moments, or parameters, gradients and
    moments"""
    optimizer: OptimizerConfig

    @property
    def forward_tokens(self) -> int:
        """Tokens of a pass without a gradient."""
        return self.forward_budget_tokens or self.budget_tokens

    @property
    def logits_chunk_mb(self) -> float:
        """MB of float32 logits in memory at one time; the logits of a pass are tokens x vocabulary.

        On a CPU a chunk fits into the cache; on a GPU it must be large enough to keep it busy.
        """
        return _GPU_LOGITS_MB if self.gpus_each > 0 else CPU_LOGITS_MB
