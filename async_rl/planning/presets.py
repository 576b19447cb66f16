"""The settings of learner and engines that follow from the model and the memory of the GPUs, and
the nodes of a cluster as one machine. Pure.

The preset of conf/hardware divides the GPUs without knowing the model; `fitted` chooses what
depends on it. A setting that the user gave is never changed.
Invariant: among the plans that fit, fewer learner ranks are preferred, then kept activations over
recomputed ones, then longer passes. If no plan fits, the result is the plan with the least memory,
which the checks refuse with its numbers.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from async_rl.config.base import with_settings
from async_rl.config.launchers import ClusterLaunch
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import (
    CUDA_CONTEXT_MB,
    engine_mb,
    gpu_memory_mb,
    kv_cache_mb,
)
from async_rl.planning.learner_memory import longest_sequence
from async_rl.planning.shape import ModelShape

_CACHE = "generation.vllm.kv_cache_mb"
_PARTS = (1, 2, 4, 8)
_LONGEST_PASS = 32768  # longer passes are not faster: the matrices are large enough before
_SHORTEST_PASS = 8192  # shorter passes leave a GPU waiting for kernels
_LARGE_GPU_MB = 40 << 10
_ROOM = 0.95  # of a GPU: drivers reserve a part, and an estimate may be a few percent low
_CACHED_SEQUENCES = 8  # an engine that holds fewer sequences in its cache decodes too few together


def fitted(
    config: RunConfig, shape: ModelShape, machine: Machine, given: Collection[str]
) -> RunConfig:
    """Return the configuration with the settings that fit the model to the GPUs of the machine.

    machine: of `nodes.fleet`. given: paths of settings that the user chose.
    """
    learner = config.learner
    engine = config.generation.vllm
    if not config.generators.gpus_each:
        # The preset's cache is for a small model; it must hold a few sequences of this model.
        cache_mb = max(engine.kv_cache_mb, kv_cache_mb(config, shape, _CACHED_SEQUENCES))
        return _with(config, {_CACHE: cache_mb}, given)
    if not machine.num_gpus or not machine.gpu_mb or not learner.gpus_each:
        return config
    batched = 8192 if machine.gpu_mb >= _LARGE_GPU_MB else 4096
    batched = max(batched, engine.max_num_seqs)
    config = _with(config, {"generation.vllm.max_num_batched_tokens": batched}, given)
    if learner.gpus_each < 1:
        return _on_one_gpu(config, shape, machine, given)
    return _on_own_gpus(config, shape, machine, given)


def learner_forms(config: RunConfig, given: Collection[str]) -> Iterator[RunConfig]:
    """Yield the ways to run the learner's passes, the fastest first."""
    longest = longest_sequence(config)
    passes = [size for n in range(6) if (size := _LONGEST_PASS >> n) > longest] + [longest]
    long_passes = [size for size in passes if size >= _SHORTEST_PASS] or passes[:1]
    for is_recomputed, tokens in [(False, n) for n in long_passes] + [(True, n) for n in passes]:
        changes = {
            "learner.gradient_checkpointing": is_recomputed,
            "learner.budget_tokens": tokens,
        }
        yield _with(config, changes, given)


def _on_own_gpus(
    config: RunConfig, shape: ModelShape, machine: Machine, given: Collection[str]
) -> RunConfig:
    """Divide whole GPUs between learner ranks and engines."""
    config = _in_parts(config, shape, machine, given)
    counts = [config.learner.ranks]
    if "learner.ranks" not in given:
        # One engine must remain.
        counts = rank_counts(config, machine, machine.num_gpus - round(config.generators.gpus_each))
    wide = (with_settings(config, {"learner.ranks": num_ranks}) for num_ranks in counts)
    best = config
    for best in itertools.chain.from_iterable(learner_forms(each, given) for each in wide):
        if gpu_memory_mb(best, "learner", shape) <= _ROOM * machine.gpu_mb:
            break
    # A share of a GPU that the learner has alone: the checks refuse it.
    parts = max(1, round(best.generators.gpus_each))
    node = machine.num_gpus // machine.nodes
    # The ranks fill one node after another; engines have the rest of a node and whole nodes.
    taken, part = divmod(best.learner.ranks, node)
    count = max(1, (machine.nodes - taken - 1) * (node // parts) + (node - part) // parts)
    return _with(best, {"generators.count": count}, given)


def _in_parts(
    config: RunConfig, shape: ModelShape, machine: Machine, given: Collection[str]
) -> RunConfig:
    """Divide an engine over as few GPUs as its weights and a small KV cache need."""
    cache_mb = kv_cache_mb(config, shape, _CACHED_SEQUENCES)
    for parts in _PARTS:
        # The learner needs a GPU too, and the GPUs of an engine are of one node.
        if parts >= machine.num_gpus or parts > machine.num_gpus // machine.nodes:
            break
        changes = {
            "generation.vllm.tensor_parallel_size": parts,
            "generators.gpus_each": float(parts),
        }
        config = _with(config, changes, given)
        room_mb = machine.gpu_mb * config.generation.vllm.gpu_memory_utilization
        if engine_mb(config, shape) + cache_mb / parts <= room_mb:
            break
    return config


def _on_one_gpu(
    config: RunConfig, shape: ModelShape, machine: Machine, given: Collection[str]
) -> RunConfig:
    """Divide one GPU between a learner and an engine, which gets its KV cache in bytes.

    vLLM would measure the free memory itself, and would count memory that the learner allocates
    during the measurement as its own.
    """
    engine = engine_mb(config, shape)
    least = kv_cache_mb(config, shape, _CACHED_SEQUENCES)
    # If no form fits, the last one, which needs least, goes to the checks.
    best = config
    for best in learner_forms(config, given):
        learner = gpu_memory_mb(best, "learner", shape)
        # Beside a process that sleeps there is its CUDA context.
        beside = CUDA_CONTEXT_MB if config.takes_turns else learner
        room = machine.gpu_mb - beside - engine
        has_room = not config.takes_turns or learner + CUDA_CONTEXT_MB <= machine.gpu_mb
        if room >= least and has_room:
            break
    # The engine holds no more sequences at a time. A tenth of the GPU stays free for memory that no
    # estimate covers.
    most = kv_cache_mb(config, shape, config.generation.vllm.max_num_seqs)
    cache = max(least, min(most, room - machine.gpu_mb // 10))
    return _with(best, {_CACHE: cache}, given)


def _with(config: RunConfig, changes: dict[str, Any], given: Collection[str]) -> RunConfig:
    """The configuration with the changes of settings that were not given."""
    return with_settings(config, {path: v for path, v in changes.items() if path not in given})


def fleet(config: RunConfig, machine: Machine) -> Machine | None:
    """Return all GPUs and the main memory of a run as one machine; None if they are not known.

    machine: of a local run, or a node of the cluster. One without GPUs (a login node) says nothing
    about the nodes.
    """
    launch = config.launcher
    if not isinstance(launch, ClusterLaunch):
        return machine
    num_gpus = launch.nodes * launch.gpus_per_node
    if not num_gpus or not machine.num_gpus or not machine.gpu_mb:
        return None
    memory_mb = launch.nodes * machine.memory_mb
    return dataclasses.replace(machine, nodes=launch.nodes, num_gpus=num_gpus, memory_mb=memory_mb)


def rank_counts(config: RunConfig, whole: Machine, most: int) -> list[int]:
    """Return the numbers of learner ranks to consider, from the configured one to `most`: every
    number on one node, then whole nodes. Each rank has work: a group of each minibatch.
    """
    learner = config.learner
    node = whole.num_gpus // whole.nodes
    groups = config.buffer.groups_per_step // learner.minibatches
    most = min(most, groups * learner.context_ranks)
    counts = range(learner.ranks, max(learner.ranks, most) + 1)
    return [n for n in counts if n % learner.context_ranks == 0 and (n <= node or n % node == 0)]
