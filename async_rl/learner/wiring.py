"""The parts of a trainer that the run's configuration describes."""

from __future__ import annotations

from async_rl.config.algorithm import AlgorithmConfig, KlConfig, LossKl
from async_rl.config.policy_losses import MomentCorrection
from async_rl.config.run import RunConfig
from async_rl.learner.forward_passes import ForwardPasses
from async_rl.learner.models import LearnerModels
from async_rl.learner.records import UpdateSettings
from async_rl.learner.sharding import Ranks
from async_rl.learner.token_rewards import RewardRules


def reference_share(reference: KlConfig | None) -> float:
    """The share of the policy that the reference takes on after each step."""
    return 0.0 if reference is None else reference.ref_ema_eta


def forward_passes(config: RunConfig, models: LearnerModels, ranks: Ranks) -> ForwardPasses:
    """The forward passes of all models."""
    reference = config.algorithm.reference
    return ForwardPasses(
        models,
        ranks,
        learner=config.learner,
        seed=config.seed,
        temperature=config.generation.temperature,
        needs_exact_kl=isinstance(reference, LossKl) and reference.estimator == "full",
    )


def update_settings(config: RunConfig) -> UpdateSettings:
    """The settings of an update."""
    return UpdateSettings(
        algorithm=config.algorithm,
        learner=config.learner,
        buffer=config.buffer,
        rules=RewardRules(
            reward=config.reward,
            max_response_tokens=config.data.max_response_tokens,
            zero_truncated=config.algorithm.truncated in ("zero_reward", "bootstrap"),
        ),
    )


def needs_policy_before(algorithm: AlgorithmConfig, models: LearnerModels) -> bool:
    """Return whether the targets depend on the policy's outputs."""
    pays_kl = algorithm.kl.kind == "reward"
    shares_backbone = models.policy.value_head is not None
    masks_by_batch = isinstance(algorithm.policy_loss.correction, MomentCorrection)
    is_vtrace = algorithm.advantage.kind == "vtrace"
    return pays_kl or is_vtrace or shares_backbone or masks_by_batch
