"""The part of the configuration's schema about the learner pool: models, memory, optimizers.

As in config.py: no default here, every field with its unit, range and meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Meta(gt=0, description="peak learning rate")]
    weight_decay: Annotated[float, Meta(ge=0, description="decoupled weight decay")]
    betas: Annotated[tuple[float, float], Meta(description="AdamW's moment decays")]
    eps: Annotated[float, Meta(gt=0, description="AdamW's epsilon")]
    warmup_steps: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "learner steps of linear warm-up; the first step has lr / warmup_steps, never 0"
            ),
        ),
    ]
    schedule: Annotated[Literal["constant", "cosine"], Meta(description="after the warm-up")]
    min_lr_ratio: Annotated[
        float, Meta(ge=0, le=1, description="floor of the cosine, as a share of lr")
    ]
    grad_clip: Annotated[float, Meta(gt=0, description="global norm")]


class CriticConfig(Section):
    """The value model: a head on a backbone of its own, copied from the policy at the start, or on
    the policy's.
    """

    enabled: Annotated[bool, Meta(description="train a critic")]
    backbone: Annotated[
        Literal["own", "shared"],
        Meta(
            description=(
                "own: a copy of the policy that trains by itself; shared: the policy's, trained on"
                " both losses, half the memory"
            )
        ),
    ]
    optimizer: OptimizerConfig
    warmup_steps: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "learner steps in which only the critic is trained; its head alone where the"
                " backbone is shared"
            ),
        ),
    ]


class LearnerConfig(Section):
    """The pool that trains."""

    ranks: Annotated[int, Meta(ge=1, description="FSDP2 ranks")]
    cores: Annotated[
        list[int], Meta(description="CPU cores they may use, dealt out in turn; empty = all")
    ]
    gpus_each: Annotated[float, Meta(ge=0, description="GPUs per rank")]
    minibatches: Annotated[int, Meta(ge=1, description="optimizer updates per batch and epoch")]
    epochs: Annotated[int, Meta(ge=1, description="passes over each batch")]
    shuffle: Annotated[
        bool,
        Meta(
            description=(
                "deal the groups to minibatches at random, anew in each epoch; false = in their"
                " order"
            )
        ),
    ]
    budget_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "packed tokens of one forward and backward pass; changes memory, never the"
                " gradient; responses that share a prompt add 4 bytes for each of them times the"
                " tokens of the longest sequence"
            ),
        ),
    ]
    logits_chunk_mb: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "MB of float32 logits that exist at one time; all tokens' are tokens x vocabulary"
            ),
        ),
    ]
    gradient_checkpointing: Annotated[
        bool, Meta(description="recompute activations in the backward pass")
    ]
    min_shard_params: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "parameters that make a module a shard unit; 0 = the blocks the model must not"
                " split are the units"
            ),
        ),
    ]
    offload: Annotated[
        Literal["none", "optimizer", "parameters"],
        Meta(
            description=(
                "what waits in host memory while it is not used: AdamW's moments, or parameters,"
                " gradients and moments"
            )
        ),
    ]
    optimizer: OptimizerConfig
    critic: CriticConfig
