"""Settings of the objective: advantages, critic, KL, aggregation.

Part of the schema in `run.py`, whose invariants hold here.  A choice is a tagged union: each
variant has only its own parameters, so a contradiction cannot be written.  algorithms/ and
docs/algorithms.md have the formulas.
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
    Share,
    Tag,
    Text,
)
from async_rl.config.policy_losses import PolicyLoss, StepScale


class ValueNorm(Section):
    """The unit of the critic's targets."""

    kind: Literal["none", "ma", "exp"]


class CriticConfig(Section):
    """The value model of gae and vtrace."""

    kind: Literal["own", "shared"]
    lr: PositiveFloat
    """peak learning rate; the rest of its AdamW is that of learner.optimizer"""
    schedule: Literal["constant", "cosine"]
    """learning rate after the warm-up of learner.optimizer"""
    warmup_steps: NonNegativeInt
    """learner steps in which only the critic is trained; only its head if the backbone is shared"""
    value_clip: PositiveFloat | None
    """clip range of the value update; null = off"""
    value_coef: PositiveFloat
    """weight of the value loss"""
    value_norm: ValueNorm
    """normalize the critic's targets by a mean and deviation that are exponential (exp), or over
    all tokens so far (ma)"""


class DiscountedAdvantage(Section):
    """Rewards count for what came before them."""

    gamma: Share
    """discount of later rewards: of grpo, dr_grpo and rloo per call of an agent, of other
    estimators per token"""


class GroupAdvantage(DiscountedAdvantage):
    """Each reward is compared with those of its group."""

    kind: Literal["grpo", "dr_grpo", "rloo"]


class ReturnAdvantage(DiscountedAdvantage):
    """The sum of a token's later rewards, minus a baseline that needs no critic."""

    kind: Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]


class CriticAdvantage(DiscountedAdvantage):
    """Temporal differences of a critic's values."""

    gae_lambda: Annotated[float, Field(ge=0, le=1)]
    """lambda of gae and vtrace"""
    critic: CriticConfig
    """own = a copy of the policy; shared = a head on the policy's backbone, trained on both losses,
    with half the memory"""


class GaeAdvantage(CriticAdvantage):
    """Generalized advantage estimation."""

    kind: Literal["gae"]


class VtraceAdvantage(CriticAdvantage):
    """V-trace: temporal differences with capped behavior weights."""

    kind: Literal["vtrace"]


class PluginAdvantage(Section):
    """Advantages of responses by a plug-in."""

    kind: Literal["plugin"]
    fn: Text
    """plug-in: function of the advantages"""


Advantage = PluginAdvantage | GroupAdvantage | ReturnAdvantage | GaeAdvantage | VtraceAdvantage


class FixedKl(Section):
    """The coefficient stays as it is."""

    kind: Literal["fixed"]


class AdaptiveKl(Section):
    """The coefficient changes so that the KL approaches a target."""

    kind: Literal["adaptive"]
    target: PositiveFloat
    """nats of KL per sequence"""
    horizon: PositiveFloat
    """sequences over which the controller corrects an error"""


class NoKl(Section):
    """No reference model is loaded."""

    kind: Literal["none"]


class KlConfig(Section):
    """The KL to a reference model."""

    coef: PositiveFloat
    """weight of the KL to the reference"""
    controller: Annotated[FixedKl | AdaptiveKl, Tag]
    """adaptive changes the coefficient so that the KL approaches a target"""
    # Below 1: with 1 the reference is the policy and the KL always 0.
    ref_ema_eta: BelowOne
    """after each step the reference becomes eta x policy + (1 - eta) x reference; 0 = fixed
    reference"""


class RewardKl(KlConfig):
    """The reward of each token pays lp - ref (k1), the only estimate whose policy gradient is that
    of the KL.
    """

    kind: Literal["reward"]


class LossKl(KlConfig):
    """The loss of each token has an estimate of the KL, or the exact KL."""

    kind: Literal["loss"]
    estimator: Literal["abs", "k2", "k3", "full"]
    """|lp-ref|, (lp-ref)^2/2, exp(ref-lp)-(ref-lp)-1, or the exact KL over the vocabulary"""


class MeanAggregation(Section):
    """The mean over tokens, or over sequences of their token means."""

    kind: Literal["token_mean", "sequence_mean"]


class SumAggregation(Section):
    """The mean over sequences of sums divided by a constant."""

    kind: Literal["sequence_sum"]
    # Not the length of the batch: a constant keeps the weight of a token over the run.
    tokens: PositiveInt
    """constant that the sums are divided by"""


class AlgorithmConfig(Section):
    """Advantages, losses and corrections."""

    advantage: Annotated[Advantage, Tag]
    """estimator; remax samples one greedy baseline per group"""
    normalize_advantages: Literal["none", "batch", "group"]
    """(A - mean) / (std + 1e-5) over all trained tokens of the batch, or of each prompt's group"""
    policy_loss: Annotated[PolicyLoss, Tag]
    """ppo = decoupled clipped surrogate; ppo_vanilla clips the ratio of policy to behavior
    policy"""
    entropy_coef: NonNegativeFloat
    """weight of the full-vocabulary entropy bonus"""
    kl: Annotated[NoKl | RewardKl | LossKl, Tag]
    """subtract the KL to a reference from the reward of each token, or add it to the loss; none =
    no reference model"""
    step_scale: Annotated[StepScale, Tag]
    """lower the learning rate of a step with few effective sequences, or change its gradient by a
    plug-in; none = neither"""
    aggregation: Annotated[MeanAggregation | SumAggregation, Tag]
    """mean over trained tokens, over sequences of their means, or over sequences of their sums
    divided by a constant"""
    truncated: Literal["train", "mask", "zero_reward", "bootstrap"]
    """truncated samples: train as others; mask = exclude from training and from advantage
    statistics; zero_reward = a task reward of 0; bootstrap = the critic's value after their end
    instead of a task reward"""

    @property
    def critic(self) -> CriticConfig | None:
        """The critic of gae and vtrace; None for the other estimators."""
        if isinstance(self.advantage, CriticAdvantage):
            return self.advantage.critic
        return None

    @property
    def reference(self) -> RewardKl | LossKl | None:
        """The KL to the reference; None if no reference model is loaded."""
        return None if isinstance(self.kl, NoKl) else self.kl
