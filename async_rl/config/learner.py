"""The part of the configuration's schema about the learner pool: models, memory, optimizers.

As in config.py: no default here, every field with its unit, range and meaning.
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
    """after the warm-up"""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)]
    """floor of the cosine, as a share of lr"""
    grad_clip: Annotated[float, Field(gt=0)]
    """global norm"""


class CriticConfig(Section):
    """The value model: a head on a backbone of its own, copied from the policy at the start, or on
    the policy's.
    """

    enabled: bool
    """train a critic"""
    backbone: Literal["own", "shared"]
    """own: a copy of the policy that trains by itself; shared: the policy's, trained on both
    losses, half the memory"""
    optimizer: OptimizerConfig
    warmup_steps: Annotated[int, Field(ge=0)]
    """learner steps in which only the critic is trained; its head alone where the backbone is
    shared"""


class LearnerConfig(Section):
    """The pool that trains."""

    ranks: Annotated[int, Field(ge=1)]
    """FSDP2 ranks"""
    cores: list[int]
    """CPU cores they may use, dealt out in turn; empty = all"""
    gpus_each: Annotated[float, Field(ge=0)]
    """GPUs per rank"""
    minibatches: Annotated[int, Field(ge=1)]
    """optimizer updates per batch and epoch"""
    epochs: Annotated[int, Field(ge=1)]
    """passes over each batch"""
    shuffle: bool
    """deal the groups to minibatches at random, anew in each epoch; false = in their order"""
    budget_tokens: Annotated[int, Field(ge=1)]
    """packed tokens of one forward and backward pass; changes memory, never the gradient; responses
    that share a prompt add 4 bytes for each of them times the tokens of the longest sequence"""
    logits_chunk_mb: Annotated[float, Field(gt=0)]
    """MB of float32 logits that exist at one time; all tokens' are tokens x vocabulary"""
    gradient_checkpointing: bool
    """recompute activations in the backward pass"""
    min_shard_params: Annotated[int, Field(ge=0)]
    """parameters that make a module a shard unit; 0 = the blocks the model must not split are the
    units"""
    offload: Literal["none", "optimizer", "parameters"]
    """what waits in host memory while it is not used: AdamW's moments, or parameters, gradients and
    moments"""
    optimizer: OptimizerConfig
    critic: CriticConfig
