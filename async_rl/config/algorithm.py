"""The part of the configuration's schema that decides the objective: advantages, losses,
corrections, KL.

As in config.py: no default here, every field with its unit, range and meaning.  Combinations that
contradict each other are refused by config_check_algorithm.py; what the settings compute is in
algorithms/ and in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class AlgorithmConfig(Section):
    """Advantages, losses and corrections."""

    advantage: Literal[
        "gae",
        "vtrace",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
    ]
    """estimator; gae and vtrace need learner.critic.enabled, remax samples one greedy baseline per
    group"""
    gamma: Annotated[float, Field(gt=0, le=1)]
    """discount per token; the group estimators have none"""
    gae_lambda: Annotated[float, Field(ge=0, le=1)]
    """lambda of gae and vtrace"""
    vtrace_rho_max: Annotated[float, Field(gt=0)]
    """cap of the behavior weight of a temporal difference, vtrace only"""
    vtrace_c_max: Annotated[float, Field(gt=0)]
    """cap of the behavior weight that carries differences back, vtrace only"""
    normalize_advantages: Literal["none", "batch", "group"]
    """(A - mean) / (std + 1e-5) over all trained tokens of the batch, or of each prompt's group"""
    policy_loss: Literal["ppo", "ppo_vanilla", "gspo", "cispo", "reinforce"]
    """ppo = decoupled clipped surrogate; ppo_vanilla clips the ratio to the behavior policy
    itself"""
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """ratio may fall to 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)]
    """ratio may rise to 1 + clip_high"""
    clip_dual: Annotated[float, Field(gt=1)] | None
    """bound on the loss of negative advantages; null = off"""
    max_mean_ratio: Annotated[float, Field(gt=1)] | None
    """a sequence whose mean ratio is above it is left out of the update; null = off"""
    behavior_correction: Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"]
    """cap (tis) or mask (mis) the behavior weight of each token, or of its whole sequence, outside
    its bounds"""
    behavior_weight_max: Annotated[float, Field(gt=1)]
    """cap, or upper bound, of exp(proximal - behavior)"""
    behavior_weight_min: Annotated[float, Field(ge=0, lt=1)]
    """lower bound of exp(proximal - behavior), mis only"""
    geometric_max: Annotated[float, Field(gt=1)] | None
    """sequences whose geometric mean weight is above it are masked; null = off"""
    geometric_min: Annotated[float, Field(gt=0, lt=1)] | None
    """sequences whose geometric mean weight is below it are masked; null = off"""
    entropy_coef: Annotated[float, Field(ge=0)]
    """weight of the full-vocabulary entropy bonus"""
    kl_coef: Annotated[float, Field(ge=0)]
    """weight of the KL to the reference; 0 = no reference model is kept"""
    kl_placement: Literal["reward", "loss"]
    """subtract the KL from the reward per token, or add it to the loss"""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"]
    """lp-ref, |lp-ref|, (lp-ref)^2/2, exp(ref-lp)-(ref-lp)-1, or the exact KL over the
    vocabulary"""
    kl_controller: Literal["fixed", "adaptive"]
    """adaptive moves kl_coef towards kl_target"""
    kl_target: Annotated[float, Field(gt=0)]
    """nats of KL per sequence that the adaptive controller aims at"""
    kl_horizon: Annotated[float, Field(gt=0)]
    """sequences over which the adaptive controller corrects an error"""
    ref_ema_eta: Annotated[float, Field(ge=0, lt=1)]
    """after a step the reference is eta x policy + (1 - eta) x reference; 0 = it stays fixed"""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"]
    """mean over trained tokens, over sequences of their token means, or over sequences of sums /
    aggregation_tokens"""
    aggregation_tokens: Annotated[int, Field(ge=1)] | None
    """tokens, the constant that sequence_sum divides by; null elsewhere"""
    mask_truncated: bool
    """truncated samples are neither trained nor part of advantage statistics"""
    zero_truncated_reward: bool
    """the task reward of truncated samples is 0; a KL in the reward stays"""
    value_clip: Annotated[float, Field(gt=0)] | None
    """clip range of the value update; null = off"""
    value_coef: Annotated[float, Field(gt=0)]
    """weight of the value loss"""
    value_norm: Literal["none", "exp", "ma"]
    """the critic learns returns in units of their running mean and spread: exponential, or over all
    tokens so far"""
    value_norm_beta: Annotated[float, Field(ge=0, lt=1)]
    """decay per step of value_norm=exp"""
    value_norm_eps: Annotated[float, Field(gt=0)]
    """smallest weight by which the running means are divided"""
