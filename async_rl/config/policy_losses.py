"""Settings of the policy loss and of its correction for stale samples.

Part of the schema in `run.py`, whose invariants hold here.  algorithms/ and docs/algorithms.md have
the formulas.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section, Tag


class Correction(Section):
    """The parameters of every correction."""

    geometric_max: Annotated[float, Field(gt=1)] | None
    """sequences whose geometric mean weight is above this value are masked; null = off"""
    geometric_min: Annotated[float, Field(gt=0, lt=1)] | None
    """sequences whose geometric mean weight is below this value are masked; null = off"""


class NoCorrection(Correction):
    """Every behavior weight is 1."""

    kind: Literal["none"]


class CapCorrection(Correction):
    """Truncated importance sampling: a weight above the maximum is capped."""

    kind: Literal["token_tis", "sequence_tis"]
    max: Annotated[float, Field(gt=1)]
    """cap (tis) or upper bound (mis) of exp(proximal - behavior)"""


class MaskCorrection(Correction):
    """Masked importance sampling: tokens or sequences outside the bounds are masked."""

    kind: Literal["token_mis", "sequence_mis"]
    max: Annotated[float, Field(gt=1)]
    """cap (tis) or upper bound (mis) of exp(proximal - behavior)"""
    min: Annotated[float, Field(gt=0, lt=1)]
    """lower bound of exp(proximal - behavior)"""


class PluginCorrection(Correction):
    """Behavior weights by a plug-in."""

    kind: Literal["plugin"]
    fn: Annotated[str, Field(min_length=1)]
    """function of the weights: package.module:function, file.py:function, or an entry point of
    async_rl.corrections"""


BehaviorCorrection = PluginCorrection | NoCorrection | CapCorrection | MaskCorrection


class PolicyLossConfig(Section):
    """The parameters of every policy loss."""

    max_mean_ratio: Annotated[float, Field(gt=1)] | None
    """a sequence whose mean ratio is above this value is excluded from the update; null = off"""


class CorrectedLoss(PolicyLossConfig):
    """A loss with the ratio to the proximal policy, so that the behavior weight is a factor."""

    correction: Annotated[BehaviorCorrection, Tag]
    """tis caps and mis masks a behavior weight outside its bounds; the weight is per token or per
    sequence"""


class ClippedLoss(CorrectedLoss):
    """The clipped surrogate: per token, or per sequence."""

    kind: Literal["ppo", "gspo"]
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)]
    """the ratio is clipped above 1 + clip_high"""
    clip_dual: Annotated[float, Field(gt=1)] | None
    """bound on the loss of negative advantages; null = off"""


class VanillaLoss(PolicyLossConfig):
    """The clipped surrogate of the ratio to the behavior policy, which needs no correction."""

    kind: Literal["ppo_vanilla"]
    correction: NoCorrection
    """none: the ratio is already to the behavior policy, so a correction would count twice"""
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)]
    """the ratio is clipped above 1 + clip_high"""
    clip_dual: Annotated[float, Field(gt=1)] | None
    """bound on the loss of negative advantages; null = off"""


class CispoLoss(CorrectedLoss):
    """The ratio is a bounded constant factor of the policy gradient."""

    kind: Literal["cispo"]
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)]
    """the ratio is clipped above 1 + clip_high"""


class ReinforceLoss(CorrectedLoss):
    """The policy gradient without a ratio."""

    kind: Literal["reinforce"]


class PluginLoss(CorrectedLoss):
    """A policy loss by a plug-in."""

    kind: Literal["plugin"]
    fn: Annotated[str, Field(min_length=1)]
    """function of the loss: package.module:function, file.py:function, or an entry point of
    async_rl.policy_losses"""


PolicyLoss = PluginLoss | ClippedLoss | VanillaLoss | CispoLoss | ReinforceLoss
