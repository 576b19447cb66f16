"""Checks of the reward's settings: combinations that cannot work, or that leave one setting
without effect.

Part of `checks/run.py`, whose invariants hold here.  Named functions are not imported here.
"""

import re
from collections.abc import Iterator

from async_rl.config.rewards import TESTS
from async_rl.config.run import RunConfig


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions among the settings of the reward and of the rollout."""
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
    # After scaling and clipping, because these values are trained on.
    passed, failed = (
        # No -0 in messages.
        max(-reward.clip, min(reward.clip, reward.scale * (value - reward.bias))) + 0.0
        for value in (reward.pass_reward, reward.fail_reward)
    )
    if passed <= failed and reward.pass_reward > reward.fail_reward:
        yield (
            f"reward.scale={reward.scale:g}, reward.bias={reward.bias:g} and"
            f" reward.clip={reward.clip:g} turn a pass into {passed:g} and a fail into {failed:g}:"
            " a pass must be worth more; set reward.scale above 0 and widen reward.clip"
        )
    has_tests = not reward.terms or TESTS in reward.terms
    if reward.placement != "end" and has_tests and reward.mode == "all_or_nothing":
        yield (
            f"reward.placement={reward.placement} with reward.mode=all_or_nothing: the verdict does"
            " not show progress between steps; set reward.mode=fraction, or reward.placement=end"
        )
    if not config.agent.is_used:
        return
    name = f"rollout.fn={config.rollout.fn}"
    if config.takes_turns:
        yield f"placement=colocated with {name}: not supported; set placement=disaggregated"
    # A session may continue on any generator, whatever pool it started in.
    if config.generators.pools:
        yield (
            f"generators.pools with {name}: sessions use all generators alike; remove"
            f" {', '.join(config.generators.pools)}"
        )
