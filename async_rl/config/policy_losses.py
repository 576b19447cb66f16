"""Settings of the policy loss: ratios, clips, the correction of old data, and the step's scale.

Part of the schema in `run.py`, whose invariants hold here, and of `algorithm.py`.
"""

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import PositiveFloat, Section, Tag, Text

_AboveOne = Annotated[float, Field(gt=1)]
_Fraction = Annotated[float, Field(gt=0, lt=1)]


class NoCorrection(Section):
    """Every behavior weight is 1."""

    kind: Literal["none"]


class CapCorrection(Section):
    """Truncated importance sampling: a weight above the maximum is capped."""

    kind: Literal["token_tis", "sequence_tis"]
    max: _AboveOne
    """cap (tis) or upper bound (mis) of exp(proximal - behavior)"""


class MaskCorrection(Section):
    """Masked importance sampling: tokens or sequences outside the bounds are masked."""

    kind: Literal["token_mis", "sequence_mis"]
    max: _AboveOne
    """cap (tis) or upper bound (mis) of exp(proximal - behavior)"""
    min: _Fraction
    """lower bound of exp(proximal - behavior)"""


class PluginCorrection(Section):
    """Behavior weights by a plug-in."""

    kind: Literal["plugin"]
    fn: Text
    """plug-in: function of the weights"""


BehaviorCorrection = PluginCorrection | NoCorrection | CapCorrection | MaskCorrection


class PolicyLossConfig(Section):
    """The parameters of every policy loss."""

    max_mean_ratio: _AboveOne | None
    """a sequence whose mean ratio is above this value is excluded from the update; null = off"""


class CorrectedLoss(PolicyLossConfig):
    """A loss with the ratio to the proximal policy, so that the behavior weight is a factor."""

    correction: Annotated[BehaviorCorrection, Tag]
    """tis caps and mis masks a behavior weight outside its bounds; the weight is per token or per
    sequence"""


class Clips(Section):
    """The bounds of a clipped surrogate."""

    clip_low: _Fraction
    """the ratio is clipped below 1 - clip_low"""
    clip_high: PositiveFloat
    """the ratio is clipped above 1 + clip_high"""
    clip_dual: _AboveOne | None
    """bound on the loss of negative advantages; null = off"""


class ClippedLoss(Clips, CorrectedLoss):
    """The clipped surrogate: per token, or per sequence."""

    kind: Literal["ppo", "gspo"]


class BehaviorLoss(PolicyLossConfig):
    """A loss with the ratio to the behavior policy, which needs no correction."""

    # A field and not a missing one, so that readers need not ask which loss it is.
    correction: NoCorrection
    """none: the ratio is already to the behavior policy, so a correction would count twice"""


class VanillaLoss(Clips, BehaviorLoss):
    """The clipped surrogate of the ratio to the behavior policy."""

    kind: Literal["ppo_vanilla"]


class CispoLoss(CorrectedLoss):
    """The ratio is a bounded constant factor of the policy gradient."""

    kind: Literal["cispo"]
    clip_low: _Fraction | None
    """the ratio is clipped below 1 - clip_low; null = no lower bound, as published"""
    clip_high: PositiveFloat
    """the ratio is clipped above 1 + clip_high"""


class ReinforceLoss(CorrectedLoss):
    """The policy gradient without a ratio."""

    kind: Literal["reinforce"]


class DppoLoss(BehaviorLoss):
    """The policy gradient within a trust region of the token's probability."""

    kind: Literal["dppo"]
    max_shift: _Fraction
    """a token whose probability moved further from the behavior policy's, towards its advantage,
    has no gradient"""


class VespoLoss(BehaviorLoss):
    """The policy gradient with a smooth bounded weight of the whole sequence."""

    kind: Literal["vespo"]


class PluginLoss(CorrectedLoss):
    """A policy loss by a plug-in."""

    kind: Literal["plugin"]
    fn: Text
    """plug-in: function of the loss"""


PolicyLoss = (
    PluginLoss | ClippedLoss | VanillaLoss | CispoLoss | ReinforceLoss | DppoLoss | VespoLoss
)


class NoStepScale(Section):
    """Every step has the scheduled learning rate."""

    kind: Literal["none"]


class EffectiveStepScale(Section):
    """The learning rate of an update is multiplied by the square root of the effective share of its
    sequences.
    """

    kind: Literal["effective_sequences"]


class PluginStepScale(Section):
    """A plug-in changes the gradient of the policy before every step."""

    kind: Literal["plugin"]
    fn: Text
    """plug-in: function of the gradients"""


StepScale = PluginStepScale | NoStepScale | EffectiveStepScale
