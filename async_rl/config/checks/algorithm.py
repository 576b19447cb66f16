"""Checks of the objective's settings: combinations that cannot work, or of which one setting would
have no effect.

Part of `checks/run.py`, whose invariants hold here.
"""

from collections.abc import Iterator

from async_rl.config.policy_losses import BehaviorLoss
from async_rl.config.rewards import TESTS
from async_rl.config.run import RunConfig

COMPARING_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions among the settings of the objective."""
    yield from _objective(config)
    yield from _policy_loss(config)
    yield from _samples(config)
    yield from _steps(config)


def _objective(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    limit = config.data.max_response_tokens
    estimator = algorithm.advantage.kind
    critic = algorithm.critic
    # The advantage of a single sample is its reward minus itself: 0.
    if estimator in COMPARING_ESTIMATORS and config.generation.group_size == 1:
        yield (
            f"generation.group_size=1 with algorithm.advantage={estimator}: the group has"
            " no other samples to compare with; set generation.group_size to at least 2, or use"
            " algorithm=ppo"
        )
    if critic is not None and critic.warmup_steps >= config.num_steps:
        yield (
            f"algorithm.advantage.critic.warmup_steps={critic.warmup_steps} is not below"
            f" num_steps={config.num_steps}: the policy would never be trained; lower it or raise"
            " num_steps"
        )
    if algorithm.truncated == "bootstrap" and critic is None:
        yield (
            f"algorithm.truncated=bootstrap with algorithm.advantage={estimator}: no critic"
            " predicts the value after a truncated sample; set algorithm.truncated=train, or"
            " algorithm.advantage=gae"
        )
    reference = algorithm.reference
    if reference is not None and reference.ref_ema_eta > 0 and config.model.adapter is not None:
        yield (
            f"algorithm.kl.ref_ema_eta={reference.ref_ema_eta:g} with model.lora=lora: the"
            " reference is the model without its adapter, which cannot move; set"
            " algorithm.kl.ref_ema_eta=0, or model.lora=none"
        )
    if config.reward.overlong_tokens > limit:
        yield (
            f"reward.overlong_tokens={config.reward.overlong_tokens} is above"
            f" data.max_response_tokens={limit}: even an empty answer would be overlong; lower it"
            f" to at most {limit}"
        )


def _policy_loss(config: RunConfig) -> Iterator[str]:
    loss = config.algorithm.policy_loss
    learner = config.learner
    num_updates = learner.minibatches * learner.epochs
    bound = config.buffer.max_staleness_versions
    correction = loss.correction.kind
    if config.algorithm.advantage.kind == "vtrace" and correction.startswith("sequence"):
        yield (
            f"algorithm.policy_loss.correction={correction} with algorithm.advantage=vtrace: the"
            " targets of V-trace have the weights of later tokens, which the weight of the sequence"
            " would count again; set algorithm.policy_loss.correction=token_tis, or"
            " algorithm.advantage=gae"
        )
    if loss.kind == "reinforce" and num_updates > 1:
        yield (
            f"algorithm.policy_loss=reinforce with learner.minibatches={learner.minibatches} and"
            f" learner.epochs={learner.epochs}: it has no ratio, so every update but the first"
            " would be wrong; set both to 1, or algorithm.policy_loss=cispo"
        )
    if isinstance(loss, BehaviorLoss):
        return
    if config.generation.quantization and correction == "none":
        yield (
            f"generation.vllm.extra={config.generation.quantization} with"
            " algorithm.policy_loss.correction=none: the weights that draw the samples are rounded"
            " and those that are trained are not; set algorithm.policy_loss.correction=token_tis"
        )
    # Before the first update the policy is the proximal policy.
    if loss.max_mean_ratio is not None and num_updates == 1:
        yield (
            f"algorithm.policy_loss.max_mean_ratio={loss.max_mean_ratio:g} with one update per"
            " batch: the ratio to the proximal policy is then always 1; set"
            " algorithm.policy_loss.max_mean_ratio=null, or raise learner.minibatches"
        )
    if loss.correction.kind == "none" and bound > 0:
        yield (
            f"algorithm.policy_loss.correction=none with buffer.max_staleness_versions={bound}:"
            " stale samples would be trained as on-policy; set buffer.max_staleness_versions=0, or"
            " algorithm.policy_loss.correction=token_tis"
        )


def _samples(config: RunConfig) -> Iterator[str]:
    kept = config.generation.group_size
    drawn = config.generation.generation_size
    # best-of-n needs n samples at least.
    if drawn is not None and drawn < kept:
        yield (
            f"generation.generation_size={drawn} is below generation.group_size={kept}: too few"
            f" samples are drawn to keep {kept}; raise it to at least {kept}, or set it to null"
        )


def _steps(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.placement == "end":
        return
    has_tests = not reward.terms or TESTS in reward.terms
    if has_tests and reward.mode == "all_or_nothing":
        yield (
            f"reward.placement={reward.placement} with reward.mode=all_or_nothing: the verdict does"
            " not show progress between steps; set reward.mode=fraction, or reward.placement=end"
        )
    if reward.extraction == "whole":
        yield (
            f"reward.placement={reward.placement} with reward.extraction=whole: a response without"
            " blocks is one step; set reward.extraction=fenced, or reward.placement=end"
        )
