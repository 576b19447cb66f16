"""Settings of the learner pool: batches, memory, optimizer.

Part of the schema in `run.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)]
    """peak learning rate"""
    weight_decay: Annotated[float, Field(ge=0)]
    """decoupled weight decay"""
    betas: Annotated[tuple[float, float], Field(strict=False)]
    """AdamW's moment decays"""
    eps: Annotated[float, Field(gt=0)]
    """AdamW's epsilon"""
    warmup_steps: Annotated[int, Field(ge=0)]
    """learner steps of linear warm-up; the first step has lr / warmup_steps, never 0"""
    schedule: Literal["constant", "cosine"]
    """learning rate after the warm-up"""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)]
    """smallest learning rate of the cosine schedule, as a share of lr"""
    schedule_span: Annotated[list[float], Field(max_length=2)]
    """steps at which the cosine begins and ends; empty = the end of the warm-up, and num_steps"""
    grad_clip: Annotated[float, Field(gt=0)]
    """largest global norm of the gradient"""


_CPU_LOGITS_MB = 16.0
_GPU_LOGITS_MB = 512.0


class LearnerConfig(Section):
    """The learner pool."""

    ranks: Annotated[int, Field(ge=1)]
    """number of FSDP2 ranks"""
    cores: list[int]
    """numbers of the CPU cores for the ranks, assigned in turn; empty = all"""
    gpus_each: Annotated[float, Field(ge=0)]
    """GPUs per rank"""
    minibatches: Annotated[int, Field(ge=1)]
    """optimizer updates per batch and epoch"""
    epochs: Annotated[int, Field(ge=1)]
    """passes over each batch"""
    shuffle: bool
    """assign the groups to minibatches at random, differently in each epoch; false = in batch
    order"""
    budget_tokens: Annotated[int, Field(ge=1)]
    """packed tokens of one forward and backward pass; affects memory, not the gradient"""
    gradient_checkpointing: bool
    """recompute activations in the backward pass, to save memory"""
    shard_units: Annotated[int, Field(ge=0)] | list[Annotated[str, Field(pattern="^\\w+$")]]
    """modules that FSDP gathers separately: names of their classes, or the parameters from which a
    module is one; 0 = the blocks that the model must not split"""
    offload: Literal["none", "optimizer", "parameters"]
    """keep in host memory while not in use: optimizer = AdamW's moments, parameters = parameters,
    gradients and moments"""
    optimizer: OptimizerConfig

    @property
    def logits_chunk_mb(self) -> float:
        """MB of float32 logits in memory at one time; the logits of a pass are tokens x vocabulary.

        On a CPU a chunk fits into the cache; on a GPU it must be large enough to keep it busy.
        """
        return _GPU_LOGITS_MB if self.gpus_each > 0 else _CPU_LOGITS_MB
