"""The settings of a learner step, and the values that it shares and records."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.learner import LearnerConfig
from async_rl.config.running import BufferConfig
from async_rl.core.frozen import frozen
from async_rl.learner.forward_passes import KeptOutputs
from async_rl.learner.objective import BatchOutputs, Targets
from async_rl.learner.objective_state import ValueUnits
from async_rl.learner.pass_loss import PolicySums
from async_rl.learner.token_rewards import RewardRules


@frozen
class UpdateSettings:
    """The sections of the configuration that a step reads."""

    algorithm: AlgorithmConfig
    learner: LearnerConfig
    buffer: BufferConfig
    rules: RewardRules


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over the updates of a step, over all ranks."""

    updates: int = 0
    policy: PolicySums = dataclasses.field(default_factory=PolicySums)
    policy_grad_norm: float = 0.0
    policy_updates: int = 0
    effective_sequences: float = 0.0
    step_scale: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0


@frozen
class StepRecord:
    """The results of a step, from which its metrics are computed.

    kl_coef, units: as they were during the step; value_lr: None without a critic.
    """

    mask: Tensor
    before: BatchOutputs
    targets: Targets
    totals: Totals
    kl_coef: float
    units: ValueUnits
    policy_lr: float
    value_lr: float | None
    forward_s: float
    advantages_s: float
    update_s: float


@frozen
class Step:
    """The values that all updates of a step share.

    value_targets: float32 [R], the returns in the critic's unit; trains_policy: False during the
    critic's warm-up.
    """

    batch: Batch
    mask: Tensor
    before: BatchOutputs
    targets: Targets
    value_targets: Tensor | None
    kept: KeptOutputs
    trains_policy: bool
    totals: Totals = dataclasses.field(default_factory=Totals)
