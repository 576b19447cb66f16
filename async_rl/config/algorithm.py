"""Settings of the objective: advantages, losses, corrections, KL.

Part of the schema in `run.py`, whose invariants hold here.  `checks/algorithm.py` refuses
combinations that contradict each other; algorithms/ and docs/algorithms.md have the formulas.
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
    """estimator; gae and vtrace need learner.critic.enabled; remax samples one greedy baseline per
    group"""
    gamma: Annotated[float, Field(gt=0, le=1)]
    """discount per token; the group estimators do not use it"""
    gae_lambda: Annotated[float, Field(ge=0, le=1)]
    """lambda of gae and vtrace"""
    vtrace_rho_max: Annotated[float, Field(gt=0)]
    """cap of the behavior weight of a temporal difference; vtrace only"""
    vtrace_c_max: Annotated[float, Field(gt=0)]
    """cap of the behavior weight that propagates later differences back; vtrace only"""
    normalize_advantages: Literal["none", "batch", "group"]
    """(A - mean) / (std + 1e-5) over all trained tokens of the batch, or of each prompt's group"""
    policy_loss: Literal["ppo", "ppo_vanilla", "gspo", "cispo", "reinforce"]
    """ppo = decoupled clipped surrogate; ppo_vanilla clips the ratio of policy to behavior
    policy"""
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)]
    """the ratio is clipped above 1 + clip_high"""
    clip_dual: Annotated[float, Field(gt=1)] | None
    """bound on the loss of negative advantages; null = off"""
    max_mean_ratio: Annotated[float, Field(gt=1)] | None
    """a sequence whose mean ratio is above this value is excluded from the update; null = off"""
    behavior_correction: Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"]
    """tis caps and mis masks a behavior weight outside its bounds; the weight is per token or per
    sequence"""
    behavior_weight_max: Annotated[float, Field(gt=1)]
    """cap (tis) or upper bound (mis) of exp(proximal - behavior)"""
    behavior_weight_min: Annotated[float, Field(ge=0, lt=1)]
    """lower bound of exp(proximal - behavior); mis only"""
    geometric_max: Annotated[float, Field(gt=1)] | None
    """sequences whose geometric mean weight is above this value are masked; null = off"""
    geometric_min: Annotated[float, Field(gt=0, lt=1)] | None
    """sequences whose geometric mean weight is below this value are masked; null = off"""
    entropy_coef: Annotated[float, Field(ge=0)]
    """weight of the full-vocabulary entropy bonus"""
    kl_coef: Annotated[float, Field(ge=0)]
    """weight of the KL to the reference; 0 = no reference model is loaded"""
    kl_placement: Literal["reward", "loss"]
    """subtract the KL from the reward per token, or add it to the loss"""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"]
    """lp-ref, |lp-ref|, (lp-ref)^2/2, exp(ref-lp)-(ref-lp)-1, or the exact KL over the
    vocabulary"""
    kl_controller: Literal["fixed", "adaptive"]
    """adaptive changes kl_coef so that the KL approaches kl_target"""
    kl_target: Annotated[float, Field(gt=0)]
    """nats of KL per sequence; the target of the adaptive controller"""
    kl_horizon: Annotated[float, Field(gt=0)]
    """sequences over which the adaptive controller corrects an error"""
    ref_ema_eta: Annotated[float, Field(ge=0, lt=1)]
    """after each step the reference becomes eta x policy + (1 - eta) x reference; 0 = fixed
    reference"""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"]
    """mean over trained tokens, over sequences of their token means, or over sequences of sums /
    aggregation_tokens"""
    aggregation_tokens: Annotated[int, Field(ge=1)] | None
    """tokens, the constant that sequence_sum divides by; null with any other aggregation"""
    mask_truncated: bool
    """truncated samples are excluded from training and from advantage statistics"""
    zero_truncated_reward: bool
    """the task reward of truncated samples is 0; a KL term in the reward remains"""
    value_clip: Annotated[float, Field(gt=0)] | None
    """clip range of the value update; null = off"""
    value_coef: Annotated[float, Field(gt=0)]
    """weight of the value loss"""
    value_norm: Literal["none", "exp", "ma"]
    """normalize the critic's targets by a running mean and standard deviation: exponential (exp),
    or over all tokens so far (ma)"""
    value_norm_beta: Annotated[float, Field(ge=0, lt=1)]
    """decay per step of value_norm=exp"""
    value_norm_eps: Annotated[float, Field(gt=0)]
    """smallest weight by which the running means are divided"""
