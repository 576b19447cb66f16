"""Checks of the objective's settings: combinations that cannot work, or of which one setting would
have no effect.

Part of `checks/run.py`, whose invariants hold here.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.run import RunConfig

CRITIC_ESTIMATORS = ("gae", "vtrace")
COMPARING_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions among the settings of the objective."""
    yield from _advantages(config)
    yield from _critic(config)
    yield from _policy_loss(config)
    yield from _corrections(config)
    yield from _kl(config)
    yield from _lengths(config)
    yield from _samples(config)
    yield from _steps(config)


def _advantages(config: RunConfig) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.learner.critic
    if algorithm.advantage in COMPARING_ESTIMATORS and config.generation.group_size == 1:
        yield (
            f"generation.group_size=1 with algorithm.advantage={algorithm.advantage}: the group has"
            " no other samples to compare with; set generation.group_size to at least 2, or use"
            " algorithm=ppo"
        )
    needs_critic = algorithm.advantage in CRITIC_ESTIMATORS
    if needs_critic and not critic.enabled:
        yield (
            f"algorithm.advantage={algorithm.advantage} without a critic: it needs values; set"
            " learner.critic.enabled=true, or algorithm.advantage to one of"
            f" {', '.join(COMPARING_ESTIMATORS)}, reinforce_plus_plus, remax"
        )
    if critic.enabled and not needs_critic:
        yield (
            f"learner.critic.enabled=true with algorithm.advantage={algorithm.advantage}: the"
            " critic would be trained but never used; set learner.critic.enabled=false, or"
            f" algorithm.advantage to one of {', '.join(CRITIC_ESTIMATORS)}"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.learner.critic
    if not critic.enabled:
        if critic.warmup_steps:
            yield (
                f"learner.critic.warmup_steps={critic.warmup_steps} without a critic: set it to 0,"
                " or use algorithm=ppo"
            )
        if critic.backbone != "own":
            yield (
                f"learner.critic.backbone={critic.backbone} without a critic: set it to own, or use"
                " algorithm=ppo"
            )
        if algorithm.value_clip is not None:
            yield (
                f"algorithm.value_clip={algorithm.value_clip:g} without a critic: set it to null,"
                " or use algorithm=ppo"
            )
        if algorithm.value_norm != "none":
            yield (
                f"algorithm.value_norm={algorithm.value_norm} without a critic: set it to none, or"
                " use algorithm=ppo"
            )
    elif critic.warmup_steps >= config.num_steps:
        yield (
            f"learner.critic.warmup_steps={critic.warmup_steps} is not below"
            f" num_steps={config.num_steps}: the policy would never be trained; lower it or raise"
            " num_steps"
        )


def _policy_loss(config: RunConfig) -> Iterator[str]:
    algorithm, learner = config.algorithm, config.learner
    loss, num_updates = algorithm.policy_loss, learner.minibatches * learner.epochs
    if algorithm.clip_dual is not None and loss in ("cispo", "reinforce"):
        yield (
            f"algorithm.clip_dual={algorithm.clip_dual:g} with algorithm.policy_loss={loss}: it"
            " bounds the clipped surrogate, which this loss does not have; set"
            " algorithm.clip_dual=null, or algorithm.policy_loss=ppo"
        )
    if loss == "reinforce" and num_updates > 1:
        yield (
            f"algorithm.policy_loss=reinforce with learner.minibatches={learner.minibatches} and"
            f" learner.epochs={learner.epochs}: it has no ratio, so every update but the first"
            " would be wrong; set both to 1, or algorithm.policy_loss=cispo"
        )
    if algorithm.max_mean_ratio is not None and loss != "ppo_vanilla" and num_updates == 1:
        yield (
            f"algorithm.max_mean_ratio={algorithm.max_mean_ratio:g} with one update per batch: the"
            " ratio to the proximal policy is then always 1; set algorithm.max_mean_ratio=null, or"
            " raise learner.minibatches"
        )


def _corrections(config: RunConfig) -> Iterator[str]:
    algorithm, bound = config.algorithm, config.buffer.max_staleness_versions
    kind, low = algorithm.behavior_correction, algorithm.behavior_weight_min
    if algorithm.policy_loss == "ppo_vanilla" and kind != "none":
        yield (
            f"algorithm.behavior_correction={kind} with algorithm.policy_loss=ppo_vanilla: its"
            " ratio is already to the behavior policy, so the correction would count twice; set"
            " algorithm.behavior_correction=none, or algorithm.policy_loss=ppo"
        )
    if algorithm.policy_loss != "ppo_vanilla" and kind == "none" and bound > 0:
        yield (
            f"algorithm.behavior_correction=none with buffer.max_staleness_versions={bound}: stale"
            " samples would be trained as on-policy; set buffer.max_staleness_versions=0, or"
            " algorithm.behavior_correction=token_tis"
        )
    if kind.endswith("mis") and low == 0:
        yield (
            f"algorithm.behavior_correction={kind} with algorithm.behavior_weight_min=0: no small"
            " weight would be masked; set algorithm.behavior_weight_min=0.5, or"
            f" algorithm.behavior_correction={kind.replace('mis', 'tis')}"
        )
    if not kind.endswith("mis") and low > 0:
        yield (
            f"algorithm.behavior_weight_min={low:g} with algorithm.behavior_correction={kind}: this"
            " correction has no lower bound; set algorithm.behavior_weight_min=0, or"
            " algorithm.behavior_correction=token_mis"
        )


def _kl(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_coef == 0 and algorithm.kl_controller == "adaptive":
        yield (
            "algorithm.kl_controller=adaptive with algorithm.kl_coef=0: a coefficient of 0 stays 0;"
            " set algorithm.kl_coef=0.1, or algorithm.kl_controller=fixed"
        )
    if algorithm.kl_coef == 0 and algorithm.ref_ema_eta:
        yield (
            f"algorithm.ref_ema_eta={algorithm.ref_ema_eta:g} with algorithm.kl_coef=0: no"
            " reference model is loaded; set algorithm.kl_coef=0.001, or algorithm.ref_ema_eta=0"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    algorithm, reward, limit = config.algorithm, config.reward, config.data.max_response_tokens
    if algorithm.aggregation == "sequence_sum" and algorithm.aggregation_tokens is None:
        yield (
            "algorithm.aggregation=sequence_sum with algorithm.aggregation_tokens=null: the sum is"
            f" divided by it; set algorithm.aggregation_tokens={limit}, the longest response"
        )
    if algorithm.aggregation != "sequence_sum" and algorithm.aggregation_tokens is not None:
        yield (
            f"algorithm.aggregation_tokens={algorithm.aggregation_tokens} with"
            f" algorithm.aggregation={algorithm.aggregation}: a mean does not use it; set"
            " algorithm.aggregation_tokens=null, or algorithm.aggregation=sequence_sum"
        )
    if algorithm.mask_truncated and algorithm.zero_truncated_reward:
        yield (
            "algorithm.zero_truncated_reward=true with algorithm.mask_truncated=true: the reward of"
            " a masked sample is not used; set one of them to false"
        )
    if reward.overlong_tokens > limit:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens} is above"
            f" data.max_response_tokens={limit}: even an empty answer would be overlong; lower it"
            f" to at most {limit}"
        )


def _samples(config: RunConfig) -> Iterator[str]:
    kept, drawn = config.generation.group_size, config.generation.generation_size
    if drawn is not None and drawn < kept:
        yield (
            f"generation.generation_size={drawn} is below generation.group_size={kept}: too few"
            f" samples are drawn to keep {kept}; raise it to at least {kept}, or set it to null"
        )


def _steps(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.placement == "end":
        return
    if reward.mode == "all_or_nothing":
        yield (
            f"reward.placement={reward.placement} with reward.mode=all_or_nothing: the verdict does"
            " not show progress between steps; set reward.mode=fraction, or reward.placement=end"
        )
    if reward.extraction == "whole":
        yield (
            f"reward.placement={reward.placement} with reward.extraction=whole: a response without"
            " blocks is one step; set reward.extraction=fenced, or reward.placement=end"
        )
