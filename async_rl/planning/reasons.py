"""Why a run has its plan: how learner and engines use the memory of the GPUs. Pure."""

from __future__ import annotations

from async_rl.config.base import replace
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import (
    engine_mb,
    gb,
    gpu_memory_mb,
    kv_token_bytes,
    longest_sequence,
)
from async_rl.planning.shape import ModelShape

Rows = list[tuple[str, str]]
"""Name and value."""


def reasons(config: RunConfig, shape: ModelShape | None, machine: Machine) -> Rows:
    """Return a row for the learner and for each pool of engines that uses GPUs of known memory."""
    if shape is None or not machine.gpu_mb:
        return []
    rows = []
    if config.learner.gpus_each > 0:
        rows.append(("learner's GPUs", learner_reason(config, shape, machine)))
    for pool in generator_pools(config):
        own = config_of(config, pool)
        if own.generators.gpus_each > 0 and own.generators.count:
            rows.append((f"GPUs of {pool}", engine_reason(own, shape, machine)))
    return rows


def learner_reason(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Return what a rank needs, how it computes, and what the next larger plan would need."""
    learner = config.learner
    activations = "recomputed" if learner.gradient_checkpointing else "kept"
    text = (
        f"{learner.ranks} x {learner.gpus_each:g}: {gb(gpu_memory_mb(config, 'learner', shape))} of"
        f" {gb(machine.gpu_mb)} each; activations are {activations}, passes have"
        f" {learner.budget_tokens:,} tokens"
    )
    if learner.gradient_checkpointing:
        kept = replace(config, learner=replace(learner, gradient_checkpointing=False))
        needed = gb(gpu_memory_mb(kept, "learner", shape))
        text += f"; keeping them needs {needed}"
    if learner.ranks > 1:
        fewer = replace(config, learner=replace(learner, ranks=learner.ranks - 1))
        needed = gb(gpu_memory_mb(fewer, "learner", shape))
        text += f"; {learner.ranks - 1} would need {needed} each"
    return text


def engine_reason(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Return what an engine needs next to its KV cache, and how much the cache holds."""
    generators, engine = config.generators, config.generation.vllm
    fixed = engine_mb(config, shape)
    source = "measured by vLLM at its start"
    cache_mb = int(engine.gpu_memory_utilization * machine.gpu_mb) - fixed
    if engine.kv_cache_mb:
        cache_mb, source = engine.kv_cache_mb, "fixed"
    parts = engine.tensor_parallel_size
    tokens = max(0, cache_mb) * 2**20 * parts // kv_token_bytes(config, shape)
    return (
        f"{generators.count} x {generators.gpus_each:g}: {gb(fixed)} for weights and a step of"
        f" {engine.max_num_batched_tokens:,} tokens, {gb(max(0, cache_mb))} of KV cache ({source}):"
        f" {tokens:,} tokens, {tokens // longest_sequence(config):,} sequences of the greatest"
        " length"
    )
