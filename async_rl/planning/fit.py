"""How a run fits a machine, in text: the reasons why it cannot, at its start and when it grows
(positions, KV cache, memory of hosts and GPUs), the numbers that follow from a configuration, and
how learner and engines use the memory of the GPUs.
"""

import collections
import math
from collections.abc import Iterator

from async_rl.config.base import with_settings
from async_rl.config.pool_sizes import in_words_of
from async_rl.config.pools import config_of, generator_pools, pool_of
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


Rows = list[tuple[str, str]]
"""Name and value."""
_OLD = 8
"""Versions: the default objective collapsed at this age, and at no lower age."""


def derived_numbers(config: RunConfig, shape: ModelShape | None) -> Rows:
    """Return the rows of the plan. shape: None if the model is not on this machine yet."""
    groups = config.buffer.groups_per_step * config.buffer.uses_per_group
    size = config.generation.group_size
    sequences = groups * size
    new = config.buffer.groups_per_step * size
    tokens = sequences * longest_sequence(config)
    generated = new * config.data.max_response_tokens
    updates = config.learner.minibatches * config.learner.epochs
    return [
        ("groups per step", f"{groups}"),
        ("sequences per step", f"{sequences} ({groups} groups x {size})"),
        ("tokens per step", f"at most {tokens:,} ({generated:,} generated)"),
        ("optimizer updates per step", f"{updates}"),
        ("staleness bound", _staleness(config)),
        *_old_data(config),
        ("sequences of the run", f"{config.num_steps * new:,} in {config.num_steps} steps"),
        ("evaluations", _evaluations(config)),
        *_sizes(config, shape),
    ]


def _staleness(config: RunConfig) -> str:
    bound = config.buffer.max_staleness_versions
    text = f"{bound} versions = at most {max_groups_in_flight(config)} groups in flight"
    return f"{text} (synchronous)" if bound == 0 else text


def _old_data(config: RunConfig) -> Rows:
    """Warn of old data where the loss has a ratio per token and the data may be that old."""
    algorithm = config.algorithm
    bound = config.buffer.max_staleness_versions
    is_per_token = algorithm.policy_loss.kind in ("ppo", "ppo_vanilla", "reinforce")
    if bound < _OLD or not is_per_token or algorithm.step_scale.kind == "effective_sequences":
        return []
    text = (
        f"a loss with a ratio per token may not learn from data of age {_OLD} and more;"
        " algorithm=gspo is made for it (docs/staleness.md)"
    )
    return [("old data", text)]


def _evaluations(config: RunConfig) -> str:
    every = config.evaluation.every_steps
    if every == 0:
        return "none"
    prompts = config.evaluation.num_prompts or "all"
    # The last step is evaluated too, also if `every` does not divide it.
    times = 1 + math.ceil(config.num_steps / every)
    return f"{times} of {prompts} held-out prompts: at step 0, every {every} steps, at the end"


def _sizes(config: RunConfig, shape: ModelShape | None) -> Rows:
    memory = gb(total_memory_mb(config, shape))
    # Without the model only libraries and buffers are counted.
    if shape is None:
        return [
            ("model", "not on this machine, size unknown"),
            ("memory estimate", f"{memory} and the model"),
        ]
    rows = [("model", f"{shape.num_parameters / 1e6:,.2f} M parameters")]
    if config.generation.is_vllm and config.generation.vllm.kv_cache_mb:
        tokens = kv_cache_tokens(config, shape, config.generation.vllm.kv_cache_mb)
        rows.append(("KV cache", f"{tokens:,} tokens per generator"))
    disk = gb(disk_mb(config, shape))
    times = f"{recorded_mb(config):,} MB of times" if config.recording != "off" else "none"
    if config.recording == "full":
        times += ", and the trajectories of all steps while 5 GB (or a tenth) of the disk is free"
    return [*rows, ("memory estimate", memory), ("disk estimate", disk), ("recording", times)]


def reasons(config: RunConfig, shape: ModelShape | None, machine: Machine) -> Rows:
    """Return a row for the learner and for each pool of engines that uses GPUs of known memory."""
    # A described machine may leave the memory of its GPUs open.
    if shape is None or not machine.gpu_mb:
        return []
    rows = []
    if config.learner.gpus_each > 0:
        rows.append(("learner's GPUs", learner_reason(config, shape, machine)))
    for pool in generator_pools(config):
        own = config_of(config, pool)
        # A pool may start empty and get processes by async-rl scale.
        if own.generators.gpus_each > 0 and own.generators.count:
            rows.append((f"GPUs of {pool}", engine_reason(own, shape, machine)))
    return rows


def learner_reason(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the memory of a rank, how it computes, and the memory with one rank less."""
    learner = config.learner
    activations = "recomputed" if learner.gradient_checkpointing else "kept"
    text = (
        f"{learner.ranks} x {learner.gpus_each:g}: {gb(gpu_memory_mb(config, 'learner', shape))} of"
        f" {gb(machine.gpu_mb)} each; activations are {activations}, passes have"
        f" {learner.budget_tokens:,} tokens"
    )
    # The reader wants to know why not fewer GPUs.
    if learner.ranks > 1:
        fewer = with_settings(config, {"learner.ranks": learner.ranks - 1})
        needed = gb(gpu_memory_mb(fewer, "learner", shape))
        text += f"; {learner.ranks - 1} would need {needed} each"
    return text


def engine_reason(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the memory of an engine without its KV cache, and how much the cache holds."""
    generators = config.generators
    engine = config.generation.vllm
    fixed = engine_mb(config, shape)
    source = "measured by vLLM at its start"
    # The share of the GPU that vLLM may use, less what it needs besides.
    cache_mb = int(engine.gpu_memory_utilization * machine.gpu_mb) - fixed
    if engine.kv_cache_mb:
        cache_mb = engine.kv_cache_mb
        source = "fixed"
    cache_mb = max(0, cache_mb)
    tokens = kv_cache_tokens(config, shape, cache_mb)
    return (
        f"{generators.count} x {generators.gpus_each:g}: {gb(fixed)} for weights and a step of"
        f" {engine.max_num_batched_tokens:,} tokens, {gb(cache_mb)} of KV cache ({source}):"
        f" {tokens:,} tokens, {tokens // longest_sequence(config):,} sequences of the greatest"
        " length"
    )
