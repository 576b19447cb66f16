"""Size estimates of a run before it starts: groups in flight, memory of each process, disk.

A process has two budgets: main memory (`memory_mb`) and the memory of each of its GPUs
(`gpu_memory_mb`).
Invariant: an estimate is an upper bound of the use of a healthy run, within a factor of about two
for main memory. So a run is rejected only if it cannot fit.
"""

import math
from collections.abc import Mapping

from async_rl.config.pool_sizes import pool_counts, role_of
from async_rl.config.pools import config_of
from async_rl.config.run import KEPT_GROUPS, PIECE_BYTES, RunConfig
from async_rl.core.types import Role
from async_rl.planning.learner_memory import (
    FLOAT32_BYTES,
    dtype_bytes,
    has_adapter,
    learner_memory,
    longest_sequence,
    trained_parameters,
)
from async_rl.planning.shape import ModelShape

# Resident memory of a process with its libraries and nothing else, measured on Linux x86-64 with
# the locked environment.
BASE_MB: Mapping[Role, int] = {
    "supervisor": 150,
    "buffer": 500,
    "verifier": 100,
    "generator": 1200,
    "gateway": 300,
    "learner": 800,
}
TENSORBOARD_MB = 300
_CPU_COPIES = 5
"""The weights in an engine without GPU: in use, in the spare copy, packed for the next push, the
block that it maps, and gaps of the allocator. Measured 4.7 with 135 million parameters.
"""
_ADAPTER_HOLES = 2.1
"""The heap of a step with an adapter and no GPU, per byte of its tensors: results of PEFT's layers
that live for a moment leave holes. Measured with 135 million parameters: 1.4 GB for 0.7 GB in one
step, and up to 5.5 GB for the process.
"""
CUDA_BASE_MB = 3000
"""Main memory of a process that uses CUDA, beyond BASE_MB: the libraries and pinned buffers."""
CUDA_CONTEXT_MB = 1500
"""GPU memory of a process next to its tensors: CUDA's context, kernels, buffers of NCCL."""
CUDA_GRAPHS_MB = 1500
"""GPU memory of vLLM's captured graphs; it reports 0.5 to 1.5 GB for models of 1 to 70B."""
GAPS = 1.05
"""The allocator's reserved memory in relation to the tensors, with expandable segments."""
SAVED_BYTES = 12  # per trained parameter in a checkpoint: weight and moments
RECORDED_BYTES_PER_SAMPLE = 16  # times of buffer/store/schema.py
STORED_BYTES_PER_TOKEN = 16  # token id, log-prob, version, mask, and the store's overhead
GROUP_BYTES = 700  # of a group's rows in the ledger, measured with benchmarks/faults/soak.py
ROW_BYTES = 4096  # of a step's row in metrics.jsonl: 3 to 4 kB
# Steps that disk is reserved for: the num_steps of a service only says that it has no end.
SERVICE_STEPS = 20_000
LOGS_MB = 100


def max_groups_in_flight(config: RunConfig) -> int:
    """Return the limit of admission: training groups issued, generating, ready or leased."""
    return (config.buffer.max_staleness_versions + 1) * config.buffer.groups_per_step


def kv_cache_tokens(config: RunConfig, shape: ModelShape, size_mb: int) -> int:
    """Return the number of tokens whose keys and values fit into a cache of this size."""
    parts = config.generation.vllm.tensor_parallel_size
    return size_mb * 2**20 * parts // kv_token_bytes(config, shape)


def kv_cache_mb(config: RunConfig, shape: ModelShape, num_sequences: float) -> int:
    """Return the KV cache of some sequences of the greatest length."""
    return _mb(num_sequences * kv_token_bytes(config, shape) * longest_sequence(config))


def kv_token_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.kv_width * dtype_bytes(config)


def memory_mb(config: RunConfig, role: Role, shape: ModelShape | None) -> int:
    """Return the main memory of one process of the role.

    shape: None if the model is unknown; then only its libraries count.
    """
    added = 0
    match role:
        case "supervisor":
            added = TENSORBOARD_MB if config.monitoring.tensorboard_port is not None else 0
        case "buffer":
            sequences = max_groups_in_flight(config) * config.generation.group_size
            added = _mb(_stored_bytes(config, sequences))
        case "verifier":
            added = config.verifiers.cells * config.sandbox.memory_mb
        case "gateway":
            # A worker with an SDK of an API: measured 90 MB.
            added = config.agent.workers * 100
        case "generator":
            added = _generator_mb(config, shape)
        case "learner":
            added = _learner_mb(config, shape)
    return BASE_MB[role] + added


def gpu_memory_mb(config: RunConfig, role: Role, shape: ModelShape) -> int:
    """Return the memory that one process of the role needs on each of its GPUs; 0 without one."""
    if role == "learner" and config.learner.gpus_each > 0:
        memory = learner_memory(config, shape)
        sent = 0
        # The two pieces of a broadcast (weights/sending.py), which is sent while steps run.
        is_sent = config.weights.transfer.kind in {"auto", "collective"}
        if is_sent and config.learner.gpus_each >= 1:
            sent = 2 * min(PIECE_BYTES, dtype_bytes(config) * shape.num_parameters)
        return CUDA_CONTEXT_MB + _mb(GAPS * (memory.kept + memory.step) + sent)
    if role == "generator" and config.generators.gpus_each > 0:
        vllm = config.generation.vllm
        # One sequence must fit, divided among the parts of the engine.
        cache = vllm.kv_cache_mb or kv_cache_mb(config, shape, 1 / vllm.tensor_parallel_size)
        return engine_mb(config, shape) + cache
    return 0


def engine_mb(config: RunConfig, shape: ModelShape) -> int:
    """Return the GPU memory of an engine without its KV cache."""
    vllm = config.generation.vllm
    size = dtype_bytes(config)
    weights = size * shape.num_parameters / vllm.tensor_parallel_size
    # vLLM profiles a step of this many tokens, and the float32 logits of all sequences: as they
    # are, scaled, and their log-probs.
    widths = 4 * shape.hidden_size + 3 * shape.mlp_width
    tokens = vllm.max_num_batched_tokens * size * widths
    logits = 3 * FLOAT32_BYTES * vllm.max_num_seqs * shape.vocab_size
    graphs = 0 if vllm.enforce_eager else CUDA_GRAPHS_MB
    tensors = _mb(GAPS * (weights + tokens + logits))
    return CUDA_CONTEXT_MB + graphs + tensors


def _generator_mb(config: RunConfig, shape: ModelShape | None) -> int:
    vllm = config.generation.vllm
    if config.generators.gpus_each > 0:
        # The front, the core's process, and a worker for each part if there are several.
        others = 1 + vllm.tensor_parallel_size * (vllm.tensor_parallel_size > 1)
        return CUDA_BASE_MB + others * (BASE_MB["generator"] + CUDA_BASE_MB)
    if shape is None:
        return vllm.kv_cache_mb
    weights = _CPU_COPIES * shape.num_parameters * dtype_bytes(config)
    if config.generation.head_dtype == "float32":
        # Of a head in bfloat16, a copy in each step.
        weights += FLOAT32_BYTES * shape.vocab_size * shape.hidden_size
    return vllm.kv_cache_mb + _mb(weights)


def _learner_mb(config: RunConfig, shape: ModelShape | None) -> int:
    if shape is None:
        return 0
    memory = learner_memory(config, shape)
    if config.learner.gpus_each == 0:
        # Without a GPU the tensors are in main memory. Offloading has nothing to move.
        holes = _ADAPTER_HOLES if has_adapter(config) else 1.0
        training = memory.kept + holes * memory.step + memory.offloaded
        if config.checkpoint.every_steps > 0 or config.checkpoint.every_minutes > 0:
            # Its copy is written during the next step.
            training += memory.saved
        # A push gathers one tensor at a time and writes the published form.
        return _mb(max(training + memory.published, memory.loaded))
    waiting = memory.offloaded
    if config.takes_turns:
        # Models and moments leave the device with the learner.
        waiting += memory.kept
    # The checkpoint that is being written; and the block of published weights, which rank 0 has and
    # the plan divides among the ranks.
    training = waiting + memory.saved + memory.published / config.learner.ranks
    return CUDA_BASE_MB + _mb(max(training, memory.loaded))


def total_memory_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the main memory of the whole run on one machine."""
    fixed: Mapping[Role, int] = {"supervisor": 1, "buffer": 1, "learner": config.learner.ranks}
    total = sum(count * memory_mb(config, role, shape) for role, count in fixed.items())
    for pool, count in pool_counts(config).items():
        total += count * memory_mb(config_of(config, pool), role_of(pool), shape)
    return total


def disk_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the disk space of the run directory at its end: checkpoints, store and logs."""
    checkpoint = config.checkpoint
    buffer = config.buffer
    num_steps = config.num_steps
    if config.agent.is_service:
        num_steps = min(num_steps, SERVICE_STEPS)
    stored = num_steps
    if checkpoint.every_steps > 0 and config.recording != "full":
        # Trajectories are deleted once the oldest of the newest checkpoints does not need them.
        needed = checkpoint.every_steps * (checkpoint.keep + 1) + buffer.max_staleness_versions
        stored = min(num_steps, needed)
    groups = num_steps * buffer.groups_per_step
    rows = min(groups, KEPT_GROUPS)
    sequences = stored * buffer.groups_per_step * config.generation.group_size
    size_bytes = _stored_bytes(config, sequences) + rows * GROUP_BYTES + num_steps * ROW_BYTES
    size_bytes += recorded_mb(config) * 2**20
    if shape is not None:
        # One more checkpoint than are kept is being written.
        num_checkpoints = checkpoint.keep + checkpoint.keep_best + 1
        trained = trained_parameters(config, shape)
        size_bytes += num_checkpoints * trained * SAVED_BYTES
    return LOGS_MB + _mb(size_bytes)


def recorded_mb(config: RunConfig) -> int:
    """Return the size of the moments of all samples (`recording`)."""
    if config.recording == "off":
        return 0
    groups = min(config.num_steps * config.buffer.groups_per_step, KEPT_GROUPS)
    return _mb(groups * config.generation.group_size * RECORDED_BYTES_PER_SAMPLE)


def _stored_bytes(config: RunConfig, sequences: int) -> int:
    return sequences * longest_sequence(config) * STORED_BYTES_PER_TOKEN


def _mb(size_bytes: float) -> int:
    return math.ceil(size_bytes / 2**20)


def gb(size_mb: int) -> str:
    """Return the size as text in GB."""
    return f"{size_mb / 1024:.1f} GB"
