"""Combinations of settings of the objective that cannot work, or of which one would silently do nothing.

Part of config_check.py, which says in what form.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config import RunConfig

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """All contradictions about the objective."""
    yield from _advantages(config)
    yield from _corrections(config)


def _advantages(config: RunConfig) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.learner.critic
    if algorithm.advantage in GROUP_ESTIMATORS and config.generation.group_size == 1:
        yield (
            f"generation.group_size=1 with algorithm.advantage={algorithm.advantage}: a sample has no others to be compared with; "
            "set generation.group_size to at least 2, or use algorithm=ppo"
        )
    if algorithm.advantage == "gae" and not critic.enabled:
        yield (
            "algorithm.advantage=gae without a critic: GAE needs values; set learner.critic.enabled=true, or algorithm.advantage to one of "
            + ", ".join(GROUP_ESTIMATORS)
        )
    if algorithm.advantage != "gae" and critic.enabled:
        yield (
            f"learner.critic.enabled=true with algorithm.advantage={algorithm.advantage}: a critic would be trained and never asked; "
            "set learner.critic.enabled=false, or algorithm.advantage=gae"
        )
    if not critic.enabled and critic.warmup_steps:
        yield f"learner.critic.warmup_steps={critic.warmup_steps} without a critic: set it to 0, or use algorithm=ppo"
    if critic.enabled and critic.warmup_steps >= config.num_steps:
        yield (
            f"learner.critic.warmup_steps={critic.warmup_steps} is not below num_steps={config.num_steps}: the policy would never "
            "be trained; lower it or raise num_steps"
        )


def _corrections(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    low = algorithm.behavior_weight_min
    if algorithm.behavior_correction == "token_mis" and low == 0:
        yield (
            "algorithm.behavior_correction=token_mis with algorithm.behavior_weight_min=0: nothing would be masked from below; "
            "set algorithm.behavior_weight_min=0.5, or algorithm.behavior_correction=token_tis"
        )
    if algorithm.behavior_correction == "token_tis" and low > 0:
        yield (
            f"algorithm.behavior_weight_min={low:g} with algorithm.behavior_correction=token_tis: truncation has no lower bound; "
            "set algorithm.behavior_weight_min=0, or algorithm.behavior_correction=token_mis"
        )
