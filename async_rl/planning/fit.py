"""The reasons why a run cannot fit a machine, at its start and when it grows: positions, KV cache,
memory of hosts and GPUs.
"""

import collections
import math
from collections.abc import Iterator

from async_rl.config.pool_sizes import in_words_of
from async_rl.config.pools import config_of, generator_pools, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import (
    gb,
    gpu_memory_mb,
    kv_cache_tokens,
    memory_mb,
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
    problems = []
    data = config.data
    longest = longest_sequence(config)
    if longest > shape.max_positions:
        problems.append(
            f"data.max_prompt_tokens={data.max_prompt_tokens} +"
            f" data.max_response_tokens={data.max_response_tokens} = {longest} is above the"
            f" {shape.max_positions} positions of the model; lower one of them"
        )
    if shape.num_heads % config.learner.context_ranks:
        problems.append(
            f"learner.context_ranks={config.learner.context_ranks} does not divide the"
            f" {shape.num_heads} attention heads of the model, which the ranks divide;"
            f" set it to a divisor of {shape.num_heads}"
        )
    if config.generation.is_vllm:
        problems += [_kv_problem(config, pool, shape) for pool in generator_pools(config)]
    total = total_memory_mb(config, shape)
    if total > machine.memory_mb:
        remedy = "lower generators.count, learner.budget_tokens or generation.vllm.kv_cache_mb"
        if config.learner.gpus_each > 0:
            # Each rank reads whole models, and copies its checkpoint.
            remedy = "lower learner.ranks or generators.count"
        owner = "this machine has" if machine.nodes == 1 else f"its {machine.nodes} nodes have"
        problems.append(
            f"the run needs about {gb(total)} of memory, {owner}"
            f" {gb(machine.memory_mb)}; {remedy}, or take a smaller model"
        )
    elif machine.nodes > 1:
        node_mb = machine.memory_mb // machine.nodes
        num_ranks = min(config.learner.ranks, machine.num_gpus // machine.nodes)
        ranks_mb = num_ranks * memory_mb(config, "learner", shape)
        if ranks_mb > node_mb:
            problems.append(
                f"the learner ranks of a node need about {gb(ranks_mb)} of memory, a node has"
                f" {gb(node_mb)}; raise learner.ranks, or take a smaller model"
            )
    # A described machine may leave the memory of its GPUs open.
    if machine.num_gpus and machine.gpu_mb:
        problems += _gpu_problems(config, shape, machine)
    # Pools with the same setting have the same problem.
    return [problem for problem in dict.fromkeys(problems) if problem]


def _kv_problem(config: RunConfig, pool: str, shape: ModelShape) -> str:
    """Why the KV cache of a pool is too small for one sequence, or an empty string."""
    own = config_of(config, pool)
    longest = longest_sequence(config)
    size_mb = own.generation.vllm.kv_cache_mb
    num_tokens = kv_cache_tokens(own, shape, size_mb)
    if size_mb == 0 or num_tokens >= longest:
        return ""
    problem = (
        f"generation.vllm.kv_cache_mb={size_mb} holds {num_tokens} tokens of this model, one"
        f" sequence may have {longest}; raise it to at least"
        f" {math.ceil(size_mb * longest / max(num_tokens, 1))}"
    )
    return in_words_of(pool, config, problem)


def gpu_load_mb(config: RunConfig, spec: ProcessSpec, shape: ModelShape, gpu_mb: int) -> int:
    """Return the memory that a process takes of each of its GPUs of gpu_mb."""
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
        loads = {spec.name: gpu_load_mb(config, spec, shape, machine.gpu_mb) for spec in specs}
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
