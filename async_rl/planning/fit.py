"""How a run fits a machine, in text: the reasons why it cannot, at its start and when it grows
(positions, KV cache, memory of hosts and GPUs), the numbers that follow from a configuration, and
how learner and engines use the memory of the GPUs.
"""

import collections
import math
from collections.abc import Iterator

from async_rl.config.base import with_settings
from async_rl.config.pool_sizes import in_words_of
from async_rl.config.pools import config_of, pool_configs, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import (
    disk_mb,
    engine_mb,
    gb,
    gpu_memory_mb,
    kv_cache_tokens,
    max_groups_in_flight,
    memory_mb,
    recorded_mb,
    total_memory_mb,
)
from async_rl.planning.learner_memory import longest_sequence
from async_rl.planning.shape import ModelShape
from async_rl.planning.topology import ProcessSpec, processes

_REMEDIES = {
    # More ranks before host memory, which slows every step; shared sequences last, because only
    # activations become smaller.
    "learner": (
        "set learner.gradient_checkpointing=true, lower learner.budget_tokens, raise learner.ranks,"
        " set learner.offload=optimizer or parameters, or raise learner.context_ranks"
    ),
    "generator": (
        "lower generation.vllm.kv_cache_mb, or set generation.vllm.tensor_parallel_size and"
        " generators.gpus_each to 2, 4 or 8"
    ),
}
"""Changes that make a process need less of its GPU, in the order to try them."""


def fit_problems(config: RunConfig, shape: ModelShape, machine: Machine) -> list[str]:
    """Return the reasons why a run cannot fit, each with its numbers and a remedy.

    machine: of `nodes.fleet`.
    """
    # Pools with the same setting have the same problem.
    return list(dict.fromkeys(_problems(config, shape, machine)))


def _problems(config: RunConfig, shape: ModelShape, machine: Machine) -> Iterator[str]:
    data = config.data
    longest = longest_sequence(config)
    if longest > shape.max_positions:
        yield (
            f"data.max_prompt_tokens={data.max_prompt_tokens} +"
            f" data.max_response_tokens={data.max_response_tokens} = {longest} is above the"
            f" {shape.max_positions} positions of the model; lower one of them"
        )
    if shape.num_heads % config.learner.context_ranks:
        yield (
            f"learner.context_ranks={config.learner.context_ranks} does not divide the"
            f" {shape.num_heads} attention heads of the model, which the ranks divide;"
            f" set it to a divisor of {shape.num_heads}"
        )
    for pool, own in pool_configs(config).items():
        size_mb = own.generation.vllm.kv_cache_mb
        num_tokens = kv_cache_tokens(own, shape, size_mb)
        if own.generation.is_vllm and size_mb and num_tokens < longest:
            problem = (
                f"generation.vllm.kv_cache_mb={size_mb} holds {num_tokens} tokens of this model,"
                f" one sequence may have {longest}; raise it to at least"
                f" {math.ceil(size_mb * longest / max(num_tokens, 1))}"
            )
            yield in_words_of(pool, config, problem)
    total = total_memory_mb(config, shape)
    if total > machine.memory_mb:
        remedy = "lower generators.count, learner.budget_tokens or generation.vllm.kv_cache_mb"
        if config.learner.gpus_each > 0:
            # Each rank reads whole models, and copies its checkpoint.
            remedy = "lower learner.ranks or generators.count"
        owner = "this machine has" if machine.nodes == 1 else f"its {machine.nodes} nodes have"
        yield (
            f"the run needs about {gb(total)} of memory, {owner}"
            f" {gb(machine.memory_mb)}; {remedy}, or take a smaller model"
        )
    elif machine.nodes > 1:
        node_mb = machine.memory_mb // machine.nodes
        num_ranks = min(config.learner.ranks, machine.num_gpus // machine.nodes)
        ranks_mb = num_ranks * memory_mb(config, "learner", shape)
        if ranks_mb > node_mb:
            yield (
                f"the learner ranks of a node need about {gb(ranks_mb)} of memory, a node has"
                f" {gb(node_mb)}; raise learner.ranks, or take a smaller model"
            )
    # A described machine may leave the memory of its GPUs open.
    if machine.gpu_mb:
        yield from _gpu_problems(config, shape, machine)


def _gpu_load_mb(config: RunConfig, spec: ProcessSpec, shape: ModelShape, gpu_mb: int) -> int:
    """The memory that a process takes of each of its GPUs of gpu_mb."""
    own = config_of(config, pool_of(spec.name))
    needed_mb = gpu_memory_mb(own, spec.role, shape)
    if spec.role == "generator" and own.generation.vllm.kv_cache_mb == 0:
        # vLLM fills this share with its KV cache.
        return max(needed_mb, int(own.generation.vllm.gpu_memory_utilization * gpu_mb))
    return needed_mb


def _gpu_problems(config: RunConfig, shape: ModelShape, machine: Machine) -> Iterator[str]:
    users: collections.defaultdict[int, list[ProcessSpec]] = collections.defaultdict(list)
    for spec in processes(config, machine):
        for index in spec.gpu_numbers:
            users[index].append(spec)
    for specs in users.values():
        loads = {spec.name: _gpu_load_mb(config, spec, shape, machine.gpu_mb) for spec in specs}
        # In turns, two processes are never on the device together.
        taken_mb = max(loads.values()) if config.takes_turns else sum(loads.values())
        if taken_mb > machine.gpu_mb:
            parts = " and ".join(f"{name} {gb(load)}" for name, load in loads.items())
            remedies = dict.fromkeys(_REMEDIES[spec.role] for spec in specs)
            yield (
                f"the model does not fit its GPU: about {gb(taken_mb)} are needed ({parts}), one"
                f" GPU has {gb(machine.gpu_mb)}; {' and '.join(remedies)}, or take a smaller model"
            )
            return


Rows = list[tuple[str, str]]
"""Name and value."""
_OLD = 8
"""Versions: the default objective collapsed at this age, and at no lower age."""


def derived_numbers(config: RunConfig, shape: ModelShape | None) -> Rows:
    """Return the rows of the plan. shape: None if the model is not on this machine yet."""
    buffer = config.buffer
    size = config.generation.group_size
    groups = buffer.groups_per_step * buffer.uses_per_group
    new = buffer.groups_per_step * size
    tokens = groups * size * longest_sequence(config)
    bound = buffer.max_staleness_versions
    # The last step is evaluated too, also if `every` does not divide it.
    every = config.evaluation.every_steps
    evaluations = "none"
    if every:
        evaluations = (
            f"{1 + math.ceil(config.num_steps / every)} of"
            f" {config.evaluation.num_prompts or 'all'} held-out prompts: at step 0, every"
            f" {every} steps, at the end"
        )
    rows = [
        ("groups per step", f"{groups}"),
        ("sequences per step", f"{groups * size} ({groups} groups x {size})"),
        (
            "tokens per step",
            f"at most {tokens:,} ({new * config.data.max_response_tokens:,} generated)",
        ),
        ("optimizer updates per step", f"{config.learner.minibatches * config.learner.epochs}"),
        (
            "staleness bound",
            f"{bound} versions = at most {max_groups_in_flight(config)} groups in flight",
        ),
        ("sequences of the run", f"{config.num_steps * new:,} in {config.num_steps} steps"),
        ("evaluations", evaluations),
        *_sizes(config, shape),
    ]
    algorithm = config.algorithm
    is_per_token = algorithm.policy_loss.kind in ("ppo", "ppo_vanilla", "reinforce")
    if bound >= _OLD and is_per_token and algorithm.step_scale.kind != "effective_sequences":
        warning = (
            f"a loss with a ratio per token may not learn from data of age {_OLD} and more;"
            " algorithm=gspo is made for it (docs/staleness.md)"
        )
        rows.append(("old data", warning))
    return rows


def _sizes(config: RunConfig, shape: ModelShape | None) -> Rows:
    memory = gb(total_memory_mb(config, shape))
    # Without the model only libraries and buffers are counted.
    if shape is None:
        return [
            ("model", "not on this machine, size unknown"),
            ("memory estimate", f"{memory} and the model"),
        ]
    times = f"{recorded_mb(config):,} MB of times" if config.recording != "off" else "none"
    if config.recording == "full":
        times += ", and the trajectories of all steps while 5 GB (or a tenth) of the disk is free"
    return [
        ("model", f"{shape.num_parameters / 1e6:,.2f} M parameters"),
        ("memory estimate", memory),
        ("disk estimate", gb(disk_mb(config, shape))),
        ("recording", times),
    ]


def reasons(config: RunConfig, shape: ModelShape | None, machine: Machine) -> Rows:
    """Return a row for the learner and for each pool of engines that uses GPUs of known memory: the
    memory of a rank, how it computes, and the memory with one rank less; the memory of an engine
    without its KV cache, and how much the cache holds.
    """
    # A described machine may leave the memory of its GPUs open.
    if shape is None or not machine.gpu_mb:
        return []
    rows = []
    learner = config.learner
    if learner.gpus_each > 0:
        activations = "recomputed" if learner.gradient_checkpointing else "kept"
        text = (
            f"{learner.ranks} x {learner.gpus_each:g}:"
            f" {gb(gpu_memory_mb(config, 'learner', shape))} of {gb(machine.gpu_mb)} each;"
            f" activations are {activations}, passes have {learner.budget_tokens:,} tokens"
        )
        # The reader wants to know why not fewer GPUs.
        if learner.ranks > 1:
            fewer = with_settings(config, {"learner.ranks": learner.ranks - 1})
            needed = gb(gpu_memory_mb(fewer, "learner", shape))
            text += f"; {learner.ranks - 1} would need {needed} each"
        rows.append(("learner's GPUs", text))
    for pool, own in pool_configs(config).items():
        generators = own.generators
        # A pool may start empty and get processes by async-rl scale.
        if generators.gpus_each == 0 or generators.count == 0:
            continue
        engine = own.generation.vllm
        fixed = engine_mb(own, shape)
        # Without a size: the share of the GPU that vLLM may use, less what it needs besides.
        cache_mb = engine.kv_cache_mb or max(
            0, int(engine.gpu_memory_utilization * machine.gpu_mb) - fixed
        )
        tokens = kv_cache_tokens(own, shape, cache_mb)
        text = (
            f"{generators.count} x {generators.gpus_each:g}: {gb(fixed)} for weights and a step of"
            f" {engine.max_num_batched_tokens:,} tokens, {gb(cache_mb)} of KV cache: {tokens:,}"
            f" tokens, {tokens // longest_sequence(config):,} sequences of the greatest length"
        )
        rows.append((f"GPUs of {pool}", text))
    return rows
