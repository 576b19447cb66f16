"""The plan of a run as rows of text: the numbers that follow from a configuration, and how learner
and engines use the memory of the GPUs.
"""

import math

from async_rl.config.base import with_settings
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import (
    disk_mb,
    engine_mb,
    gb,
    gpu_memory_mb,
    kv_cache_tokens,
    max_groups_in_flight,
    recorded_mb,
    total_memory_mb,
)
from async_rl.planning.learner_memory import longest_sequence
from async_rl.planning.shape import ModelShape

Rows = list[tuple[str, str]]
"""Name and value."""
_OLD = 8
"""Versions: the default objective collapsed at this age, and at no lower age."""


def derived_numbers(config: RunConfig, shape: ModelShape | None) -> Rows:
    """Return the rows of the plan. shape: None if the model is not on this machine yet."""
    groups = config.buffer.groups_per_step
    size = config.generation.group_size
    sequences = groups * size
    tokens = sequences * longest_sequence(config)
    generated = sequences * config.data.max_response_tokens
    updates = config.learner.minibatches * config.learner.epochs
    return [
        ("groups per step", f"{groups}"),
        ("sequences per step", f"{sequences} ({groups} groups x {size})"),
        ("tokens per step", f"at most {tokens:,} ({generated:,} generated)"),
        ("optimizer updates per step", f"{updates}"),
        ("staleness bound", _staleness(config)),
        *_old_data(config),
        ("sequences of the run", f"{config.num_steps * sequences:,} in {config.num_steps} steps"),
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
        f"algorithm=grpo collapsed in 3 of 3 runs of the embedded task at age {_OLD};"
        " algorithm=gspo in none at any age (docs/staleness.md)"
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
