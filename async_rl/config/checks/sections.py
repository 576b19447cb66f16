"""Checks of single sections: the pools of generators, the reward, the extra arguments of vLLM.

Part of `checks/run.py`, whose invariants hold here.  Functions and vLLM are not imported here.
Invariant: an entry of `generation.vllm.extra` is passed on only if the project does not set it and
if pushes, labels and log-probs stay what generation/engine.py promises; vllm_extra.toml has the
arguments that are refused.  An argument that changes how the engine computes (quantization, dtype
of the KV cache, attention backend) is passed on: the probe after a push and
`mismatch/engine_abs_mean` measure it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.config.base import as_builtins
from async_rl.config.generation import PoolConfig
from async_rl.config.pools import PLACES
from async_rl.config.rewards import TESTS
from async_rl.config.run import RunConfig
from async_rl.core.records import read_packaged

_TABLES = read_packaged(__package__, "vllm_extra.toml", dict[str, dict[str, Any]])


def pool_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of generators.pools."""
    pools = config.generators.pools
    for name, pool in pools.items():
        yield from _problems_of(config, name, pool)
        if config.takes_turns:
            yield (
                f"generators.pools.{name} with placement=colocated: the learner shares its device"
                " with the generators of one pool only; remove this pool"
            )
    evaluating = [name for name, pool in pools.items() if pool.work == "evaluation"]
    # An evaluation belongs to one kind of pool. With both, its results would depend on which
    # generators are free.
    for name in [name for name, pool in pools.items() if evaluating and pool.work == "both"]:
        yield (
            f"generators.pools.{name}.work=both, but generators.pools.{evaluating[0]} only"
            f" evaluates and gets every evaluation; set generators.pools.{name}.work=train"
        )
    if evaluating and config.evaluation.every_steps == 0:
        yield (
            f"generators.pools.{evaluating[0]}.work=evaluation with evaluation.every_steps=0: its"
            " generators would never have work; remove the pool, or set evaluation.every_steps=5"
        )
    if (
        pools
        and config.generators.count == 0
        and config.evaluation.every_steps
        and all(p.work == "train" for p in pools.values())
    ):
        yield (
            "generators.count=0 and every pool of generators.pools has work=train: no generator"
            " would evaluate; set work=both for one pool, or evaluation.every_steps=0"
        )


def _problems_of(config: RunConfig, name: str, pool: PoolConfig) -> Iterator[str]:
    path = f"generators.pools.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield (
            f"{path}: becomes part of process names; use lowercase letters, digits and underscores,"
            " with a letter first"
        )
    launcher = config.launcher
    for key, value in as_builtins(pool).items():
        place = PLACES.get(key, "")
        if place.startswith("generation.vllm.") and not config.generation.is_vllm:
            cause = f"generation.engine={config.generation.engine}"
        elif place.startswith("launcher.") and launcher.is_one_machine:
            cause = f"launcher={launcher.kind}, which uses one machine"
        elif key == "cores" and value and not launcher.is_one_machine:
            cause = f"launcher={launcher.kind}, which assigns the cores"
        else:
            continue
        yield f"{path}.{key}={value} has no effect with {cause}; remove it"


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


def extra_problems(
    entries: Sequence[str], *, is_eager: bool = False, is_gpu: bool = False
) -> Iterator[str]:
    """Yield a line for each entry that cannot be passed on. Names that the installed vLLM does not
    have are found where vLLM is (generation/environment.py).

    is_eager: generation.vllm.enforce_eager; is_gpu: generators have GPUs.
    """
    settings, refused, prefixes, cpu = _TABLES.values()
    given: set[str] = set()
    for entry in entries:
        name, _, value = entry.partition("=")
        path = f"generation.vllm.extra={entry}"
        prefix = next((start for start in prefixes if name.startswith(start)), "")
        if name in given:
            yield f"{path}: {name} is given twice; give it once"
        elif name in settings:
            yield f"{path}: the project sets {name}; set {settings[name]}"
        elif name in refused or prefix:
            reason = refused.get(name) or prefixes[prefix]
            yield f"{path}: {reason}; remove it"
        elif name == "speculative_config" and (is_gpu or '"ngram"' not in entry):
            # A draft model would need separate pushes.
            yield f"{path}: log-probs are checked for drafts by ngram on a CPU only; remove it"
        elif not is_gpu and value not in cpu.get(name, [value]):
            yield f"{path}: vLLM on a CPU would be wrong; set one of {', '.join(cpu[name])}"
        elif is_eager and name == "compilation_config":
            # vLLM would replace it without an error.
            eager = "generation.vllm.enforce_eager"
            yield f"{path}: {eager}=true compiles nothing; set {eager}=false, or remove the entry"
        given.add(name)
