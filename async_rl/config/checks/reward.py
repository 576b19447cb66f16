"""Checks of the reward's settings: combinations that cannot work, or of which one setting would
have no effect.

Part of `checks/run.py`, whose invariants hold here.  Named functions are not imported here.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.plugins import REWARD, ROLLOUT, is_plugin
from async_rl.config.reward_terms import READY, TESTS, functions_of, same_names, setting_of
from async_rl.config.run import RunConfig


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions among the reward's settings."""
    yield from _functions(config)
    yield from _ready(config)
    yield from _scale(config)
    yield from _rollout(config)


def _rollout(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.fn is None:
        return
    if not is_plugin(rollout.fn, ROLLOUT):
        yield (
            f"rollout.fn={rollout.fn}: is neither package.module:function nor file.py:function;"
            " correct it"
        )
    if config.reward.placement != "end":
        yield (
            f"reward.placement={config.reward.placement} with rollout.fn={rollout.fn}: only the"
            " last turn is scored, not the blocks of all turns; set reward.placement=end"
        )


def _functions(config: RunConfig) -> Iterator[str]:
    reward, functions = config.reward, functions_of(config.reward)
    if reward.fn and reward.fns:
        yield (
            f"reward.fn={reward.fn} and reward.fns={reward.fns}: only one of the two may be set;"
            " put all functions into reward.fns"
        )
    if len(reward.fns) != len(reward.weights):
        yield (
            f"reward.weights={reward.weights} has {len(reward.weights)} values for the"
            f" {len(reward.fns)} functions of reward.fns; set one weight per function, in the same"
            " order"
        )
    for name in functions:
        if name not in READY and not is_plugin(name, REWARD):
            yield (
                f"{setting_of(reward, name)}={name}: is neither package.module:function nor"
                f" file.py:function, nor a provided function ({', '.join((TESTS, *READY))});"
                " correct it"
            )
    for name in same_names(functions):
        yield (
            f"reward.fns: two functions have the name {name}, so their metrics would be mixed;"
            " rename one"
        )
    if functions and reward.placement != "end":
        yield (
            f"reward.placement={reward.placement} with"
            f" {setting_of(reward, functions[0])}={functions[0]}: functions score whole responses;"
            " set reward.placement=end"
        )


def _ready(config: RunConfig) -> Iterator[str]:
    reward, functions = config.reward, functions_of(config.reward)
    for name, path, value in (
        ("reward_model", "reward.model.path", reward.model.path),
        ("remote", "reward.remote.url", reward.remote.url),
    ):
        if name in functions and value is None:
            yield f"{path}=null but {setting_of(reward, name)} names {name}; set {path}"
        if name not in functions and value is not None:
            yield (f"{path}={value}: is not used; add {name} to reward.fns, or set {path}=null")
    if (
        reward.format_reward is not None
        and not reward.fail_reward <= reward.format_reward < reward.pass_reward
    ):
        yield (
            f"reward.format_reward={reward.format_reward:g} is not from"
            f" reward.fail_reward={reward.fail_reward:g} to below"
            f" reward.pass_reward={reward.pass_reward:g}: the format must be worth less than a"
            " correct answer; set it between them"
        )


def _scale(config: RunConfig) -> Iterator[str]:
    reward = config.reward

    def scaled(task_reward: float) -> float:
        return (
            max(-reward.clip, min(reward.clip, reward.scale * (task_reward - reward.bias))) + 0.0
        )  # no -0 in messages

    if reward.pass_reward <= reward.fail_reward:
        yield (
            f"reward.pass_reward={reward.pass_reward:g} is not above"
            f" reward.fail_reward={reward.fail_reward:g}: the policy would learn to fail; raise"
            " reward.pass_reward"
        )
    elif scaled(reward.pass_reward) <= scaled(reward.fail_reward):
        yield (
            f"reward.scale={reward.scale:g}, reward.bias={reward.bias:g} and"
            f" reward.clip={reward.clip:g} turn a pass into {scaled(reward.pass_reward):g} and a"
            f" fail into {scaled(reward.fail_reward):g}: a pass must be worth more; set"
            " reward.scale above 0 and widen reward.clip"
        )
