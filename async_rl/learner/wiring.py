"""The parts of a trainer that the run's configuration describes."""

from __future__ import annotations

from async_rl.config.algorithm import KlConfig, LossKl
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
