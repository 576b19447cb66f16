"""The part of the configuration's schema that decides the objective: advantages, losses,
corrections, KL.

As in config.py: no default here, every field with its unit, range and meaning.  Combinations that
contradict each other are refused by config_check_algorithm.py; what the settings compute is in
algorithms/ and in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class AlgorithmConfig(Section):
    """Advantages, losses and corrections."""

    advantage: Annotated[
        Literal[
            "gae",
            "vtrace",
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
        ],
        Meta(
            description=(
                "estimator; gae and vtrace need learner.critic.enabled, remax samples one greedy"
                " baseline per group"
            )
        ),
    ]
    gamma: Annotated[
        float, Meta(gt=0, le=1, description="discount per token; the group estimators have none")
    ]
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="lambda of gae and vtrace")]
    vtrace_rho_max: Annotated[
        float,
        Meta(gt=0, description="cap of the behavior weight of a temporal difference, vtrace only"),
    ]
    vtrace_c_max: Annotated[
        float,
        Meta(
            gt=0,
            description="cap of the behavior weight that carries differences back, vtrace only",
        ),
    ]
    normalize_advantages: Annotated[
        Literal["none", "batch", "group"],
        Meta(
            description=(
                "(A - mean) / (std + 1e-5) over all trained tokens of the batch, or of each"
                " prompt's group"
            )
        ),
    ]
    policy_loss: Annotated[
        Literal["ppo", "ppo_vanilla", "gspo", "cispo", "reinforce"],
        Meta(
            description=(
                "ppo = decoupled clipped surrogate; ppo_vanilla clips the ratio to the behavior"
                " policy itself"
            )
        ),
    ]
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="ratio may fall to 1 - clip_low")]
    clip_high: Annotated[float, Meta(gt=0, description="ratio may rise to 1 + clip_high")]
    clip_dual: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="bound on the loss of negative advantages; null = off"),
    ]
    max_mean_ratio: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(
            description=(
                "a sequence whose mean ratio is above it is left out of the update; null = off"
            )
        ),
    ]
    behavior_correction: Annotated[
        Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"],
        Meta(
            description=(
                "cap (tis) or mask (mis) the behavior weight of each token, or of its whole"
                " sequence, outside its bounds"
            )
        ),
    ]
    behavior_weight_max: Annotated[
        float, Meta(gt=1, description="cap, or upper bound, of exp(proximal - behavior)")
    ]
    behavior_weight_min: Annotated[
        float, Meta(ge=0, lt=1, description="lower bound of exp(proximal - behavior), mis only")
    ]
    geometric_max: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(
            description="sequences whose geometric mean weight is above it are masked; null = off"
        ),
    ]
    geometric_min: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(
            description="sequences whose geometric mean weight is below it are masked; null = off"
        ),
    ]
    entropy_coef: Annotated[
        float, Meta(ge=0, description="weight of the full-vocabulary entropy bonus")
    ]
    kl_coef: Annotated[
        float,
        Meta(ge=0, description="weight of the KL to the reference; 0 = no reference model is kept"),
    ]
    kl_placement: Annotated[
        Literal["reward", "loss"],
        Meta(description="subtract the KL from the reward per token, or add it to the loss"),
    ]
    kl_estimator: Annotated[
        Literal["k1", "abs", "k2", "k3", "full"],
        Meta(
            description=(
                "lp-ref, |lp-ref|, (lp-ref)^2/2, exp(ref-lp)-(ref-lp)-1, or the exact KL over the"
                " vocabulary"
            )
        ),
    ]
    kl_controller: Annotated[
        Literal["fixed", "adaptive"], Meta(description="adaptive moves kl_coef towards kl_target")
    ]
    kl_target: Annotated[
        float,
        Meta(gt=0, description="nats of KL per sequence that the adaptive controller aims at"),
    ]
    kl_horizon: Annotated[
        float,
        Meta(gt=0, description="sequences over which the adaptive controller corrects an error"),
    ]
    ref_ema_eta: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description=(
                "after a step the reference is eta x policy + (1 - eta) x reference; 0 = it stays"
                " fixed"
            ),
        ),
    ]
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum"],
        Meta(
            description=(
                "mean over trained tokens, over sequences of their token means, or over sequences"
                " of sums / aggregation_tokens"
            )
        ),
    ]
    aggregation_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="tokens, the constant that sequence_sum divides by; null elsewhere"),
    ]
    mask_truncated: Annotated[
        bool,
        Meta(description="truncated samples are neither trained nor part of advantage statistics"),
    ]
    zero_truncated_reward: Annotated[
        bool,
        Meta(description="the task reward of truncated samples is 0; a KL in the reward stays"),
    ]
    value_clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="clip range of the value update; null = off"),
    ]
    value_coef: Annotated[float, Meta(gt=0, description="weight of the value loss")]
    value_norm: Annotated[
        Literal["none", "exp", "ma"],
        Meta(
            description=(
                "the critic learns returns in units of their running mean and spread: exponential,"
                " or over all tokens so far"
            )
        ),
    ]
    value_norm_beta: Annotated[
        float, Meta(ge=0, lt=1, description="decay per step of value_norm=exp")
    ]
    value_norm_eps: Annotated[
        float, Meta(gt=0, description="smallest weight by which the running means are divided")
    ]
