"""Checks of the reward's settings: combinations that cannot work, or that leave one setting
without effect.

Part of `checks/run.py`, whose invariants hold here.  Named functions are not imported here.
"""

import re
from collections.abc import Iterator

from async_rl.config.plugins import REWARD, ROLLOUT, is_plugin
from async_rl.config.rewards import TESTS, PluginTerm
from async_rl.config.rollout import EXTERNAL
from async_rl.config.run import RunConfig


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions among the reward's settings."""
    yield from _functions(config)
    yield from _scale(config)
    yield from _steps(config)
    yield from _rollout(config)


def _rollout(config: RunConfig) -> Iterator[str]:
    fn = config.rollout.fn
    if fn is None:
        return
    name = f"rollout.fn={fn}"
    if not config.agent.is_used and not is_plugin(str(fn), ROLLOUT):
        yield (
            f"{name}: is neither package.module:function nor file.py:function, nor {EXTERNAL};"
            " correct it"
        )
    if config.agent.is_used and config.takes_turns:
        yield f"placement=colocated with {name}: not supported; set placement=disaggregated"
    # A session may continue on any generator, whatever pool it started in.
    if config.agent.is_used and config.generators.pools:
        yield (
            f"generators.pools with {name}: sessions use all generators alike; remove"
            f" {', '.join(config.generators.pools)}"
        )


def _functions(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    for name, term in reward.terms.items():
        path = f"reward.terms.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f"{path}: becomes the name of metrics; use letters, digits and underscores"
        if (name == TESTS) != (term.kind == TESTS):
            yield (
                f"{path}={term.kind}: the row's tests, and no other term, have the name {TESTS};"
                " choose another"
            )
        if isinstance(term, PluginTerm) and not is_plugin(term.fn, REWARD):
            yield (
                f"{path}.fn={term.fn}: is neither package.module:function nor file.py:function, nor"
                " an entry point of async_rl.rewards; correct it"
            )


def _scale(config: RunConfig) -> Iterator[str]:
    reward = config.reward

    def scaled(task_reward: float) -> float:
        return (
            max(-reward.clip, min(reward.clip, reward.scale * (task_reward - reward.bias))) + 0.0
        )  # no -0 in messages

    # After scaling and clipping, because these values are trained on.
    is_lost = scaled(reward.pass_reward) <= scaled(reward.fail_reward)
    if is_lost and reward.pass_reward > reward.fail_reward:
        yield (
            f"reward.scale={reward.scale:g}, reward.bias={reward.bias:g} and"
            f" reward.clip={reward.clip:g} turn a pass into {scaled(reward.pass_reward):g} and a"
            f" fail into {scaled(reward.fail_reward):g}: a pass must be worth more; set"
            " reward.scale above 0 and widen reward.clip"
        )


def _steps(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    has_tests = not reward.terms or TESTS in reward.terms
    if reward.placement != "end" and has_tests and reward.mode == "all_or_nothing":
        yield (
            f"reward.placement={reward.placement} with reward.mode=all_or_nothing: the verdict does"
            " not show progress between steps; set reward.mode=fraction, or reward.placement=end"
        )
