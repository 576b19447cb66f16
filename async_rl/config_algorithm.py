"""The part of the configuration's schema that decides the objective: advantages, losses, corrections, KL.

As in config.py: no default here, every field with its unit, range and meaning.  Combinations that contradict each other are refused by
config_check_algorithm.py; what the settings compute is in algorithms/ and in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config_base import Section


class AlgorithmConfig(Section):
    """Advantages, losses and corrections."""

    advantage: Annotated[Literal["gae", "grpo", "dr_grpo", "rloo"], Meta(description="estimator; gae needs learner.critic.enabled")]
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount per token")]
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="GAE's lambda")]
    normalize_advantages: Annotated[bool, Meta(description="(A - mean) / (std + 1e-5) over all trained tokens of the batch")]
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="ratio may fall to 1 - clip_low")]
    clip_high: Annotated[float, Meta(gt=0, description="ratio may rise to 1 + clip_high")]
    clip_dual: Annotated[Annotated[float, Meta(gt=1)] | None, Meta(description="bound on the loss of negative advantages; null = off")]
    behavior_correction: Annotated[
        Literal["token_tis", "token_mis"], Meta(description="cap (truncate) or mask the behavior weight outside its bounds")
    ]
    behavior_weight_max: Annotated[float, Meta(gt=1, description="cap, or upper bound, of exp(proximal - behavior)")]
    behavior_weight_min: Annotated[float, Meta(ge=0, lt=1, description="lower bound of exp(proximal - behavior) for token_mis")]
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of the full-vocabulary entropy bonus")]
    kl_coef: Annotated[float, Meta(ge=0, description="weight of the KL to the reference; 0 = no reference model is kept")]
    kl_placement: Annotated[Literal["reward", "loss"], Meta(description="subtract the KL from the reward per token, or add it to the loss")]
    kl_estimator: Annotated[Literal["k1", "abs", "k2", "k3"], Meta(description="lp-ref, |lp-ref|, (lp-ref)^2/2, exp(ref-lp)-(ref-lp)-1")]
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean"], Meta(description="mean over trained tokens, or over sequences of their token means")
    ]
    mask_truncated: Annotated[bool, Meta(description="truncated samples are neither trained nor part of advantage statistics")]
    value_clip: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="clip range of the value update; null = off")]
    value_coef: Annotated[float, Meta(gt=0, description="weight of the value loss")]
