"""Size estimates of a run before it starts: groups in flight, memory and disk.

Invariant: an estimate is an upper bound of what a healthy run uses, within a factor of about two.
So a run is rejected only if it cannot fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.pools import config_of, generator_pools, in_words_of
from async_rl.config.run import RunConfig
from async_rl.core.types import Role

# Resident memory of a process with its libraries and nothing else, measured on Linux x86-64 with
# the locked environment.
BASE_MB: Mapping[Role, int] = {
    "supervisor": 150,
    "buffer": 500,
    "verifier": 100,
    "generator": 1200,
    "learner": 800,
}
TENSORBOARD_MB = 300
FLOAT32_BYTES = 4
TRAINED_BYTES = 16  # per trained parameter: float32 weight, gradient and AdamW's two moments
SAVED_BYTES = 12  # per trained parameter in a checkpoint: weight and moments
ACTIVATION_VALUES = 34  # per token, layer and unit of width that the backward pass keeps
EMBEDDED_VOCABULARY, EMBEDDED_POSITIONS, EMBEDDED_MLP_FACTOR = 1024, 512, 3
STORED_BYTES_PER_TOKEN = 16  # token id, log-prob, version, mask, and the store's overhead
LOGS_MB = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of the policy that decide memory. max_positions: its longest sequence."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    kv_width: int
    max_positions: int


def embedded_shape(*, hidden_size: int, num_layers: int, num_heads: int) -> ModelShape:
    """Return the shape of the embedded model; its vocabulary is at most EMBEDDED_VOCABULARY."""
    return shape_from_hf(
        {
            "vocab_size": EMBEDDED_VOCABULARY,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "intermediate_size": EMBEDDED_MLP_FACTOR * hidden_size,
            "max_position_embeddings": EMBEDDED_POSITIONS,
            "tie_word_embeddings": True,
        }
    )


def shape_from_hf(hf_config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a decoder-only model from its Hugging Face config.json.

    Raises KeyError if a size is missing.
    """
    vocab = hf_config["vocab_size"]
    hidden = hf_config["hidden_size"]
    layers = hf_config["num_hidden_layers"]
    heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hidden // heads
    # Older models have as many key and value heads as query heads, and do not name them.
    kv_width = (hf_config.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
    # Gate, up and down projection; two norms.
    per_layer = attention + 3 * hidden * hf_config["intermediate_size"] + 2 * hidden
    num_embeddings = 1 if hf_config.get("tie_word_embeddings") else 2
    return ModelShape(
        num_parameters=num_embeddings * vocab * hidden + layers * per_layer + hidden,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        kv_width=kv_width,
        max_positions=hf_config["max_position_embeddings"],
    )


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest sequence, prompt and response."""
    return config.data.max_prompt_tokens + config.data.max_response_tokens


def max_groups_in_flight(config: RunConfig) -> int:
    """Return the limit of admission: training groups issued, generating, ready or leased."""
    return (config.buffer.max_staleness_versions + 1) * config.buffer.groups_per_step


def kv_cache_tokens(config: RunConfig, shape: ModelShape) -> int:
    """Return the number of tokens whose keys and values fit into kv_cache_mb."""
    # 2: keys and values.
    token_bytes = 2 * shape.num_layers * shape.kv_width * _dtype_bytes(config)
    return config.generation.vllm.kv_cache_mb * 2**20 // token_bytes


def memory_mb(config: RunConfig, role: Role, shape: ModelShape | None) -> int:
    """Return the RAM of one process of the role without a GPU.

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
        case "generator":
            added = config.generation.vllm.kv_cache_mb
            if shape is not None:
                # A push loads the new weights beside the old ones.
                added += _mb(2 * shape.num_parameters * _dtype_bytes(config))
        case "learner":
            if shape is not None:
                added = learner_model_mb(config, shape)
    return BASE_MB[role] + added


def learner_model_mb(config: RunConfig, shape: ModelShape) -> int:
    """Return the memory of one rank's models, moments, activations and push."""
    learner = config.learner
    per_parameter = TRAINED_BYTES * _num_trained(config.algorithm)
    if config.algorithm.reference is not None:
        per_parameter += FLOAT32_BYTES
    sharded = shape.num_parameters * per_parameter / learner.ranks
    # A push gathers the float32 weights and writes the published form beside them.
    pushed = shape.num_parameters * (FLOAT32_BYTES + _dtype_bytes(config))
    kept_layers = 1 if learner.gradient_checkpointing else shape.num_layers
    values = shape.hidden_size * (ACTIVATION_VALUES * kept_layers + shape.num_layers)
    activations = learner.budget_tokens * values * FLOAT32_BYTES
    logits = 3 * int(learner.logits_chunk_mb * 2**20)
    masks = 0
    if config.generation.group_size > 1:
        # Responses that share a prompt attend through a dense mask, of which bfloat16 makes a copy.
        mask_bytes = FLOAT32_BYTES + _dtype_bytes(config) % FLOAT32_BYTES
        masks = learner.budget_tokens * longest_sequence(config) * mask_bytes
    return _mb(sharded + pushed + activations + logits + masks)


def total_memory_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the RAM of the whole run on one machine."""
    counts: Mapping[Role, int] = {
        "supervisor": 1,
        "buffer": 1,
        "verifier": config.verifiers.count,
        "learner": config.learner.ranks,
    }
    total = sum(count * memory_mb(config, role, shape) for role, count in counts.items())
    for pool in generator_pools(config):
        own = config_of(config, pool)
        total += own.generators.count * memory_mb(own, "generator", shape)
    return total


def disk_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the disk space of the run directory at its end: checkpoints, store and logs."""
    checkpoint = config.checkpoint
    sequences = config.num_steps * config.buffer.groups_per_step * config.generation.group_size
    size_bytes = _stored_bytes(config, sequences)
    if shape is not None:
        # One more checkpoint than are kept is being written.
        num_checkpoints = checkpoint.keep + checkpoint.keep_best + 1
        trained = _num_trained(config.algorithm) * shape.num_parameters
        size_bytes += num_checkpoints * trained * SAVED_BYTES
    return LOGS_MB + _mb(size_bytes)


def fit_problems(config: RunConfig, shape: ModelShape, *, memory_mb_available: int) -> list[str]:
    """Return the reasons why a run cannot fit.

    A sequence can be too long for the model or for the KV cache, and the run too large for memory.
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
    if config.generation.engine == "vllm":
        problems += [_kv_problem(config, pool, shape) for pool in generator_pools(config)]
    total = total_memory_mb(config, shape)
    if total > memory_mb_available:
        problems.append(
            f"the run needs about {gb(total)} of memory, this machine has"
            f" {gb(memory_mb_available)}; lower generators.count, learner.budget_tokens or"
            " generation.vllm.kv_cache_mb, or take a smaller model"
        )
    # Pools with the same setting have the same problem.
    return [problem for problem in dict.fromkeys(problems) if problem]


def _kv_problem(config: RunConfig, pool: str, shape: ModelShape) -> str:
    """Why the KV cache of a pool is too small for one sequence, or an empty string."""
    own = config_of(config, pool)
    longest = longest_sequence(config)
    size_mb = own.generation.vllm.kv_cache_mb
    num_tokens = kv_cache_tokens(own, shape)
    if size_mb == 0 or num_tokens >= longest:
        return ""
    problem = (
        f"generation.vllm.kv_cache_mb={size_mb} holds {num_tokens} tokens of this model, one"
        f" sequence may have {longest}; raise it to at least"
        f" {math.ceil(size_mb * longest / max(num_tokens, 1))}"
    )
    return in_words_of(pool, config, problem)


def _num_trained(algorithm: AlgorithmConfig) -> int:
    """The number of trained models of the policy's size."""
    return 2 if algorithm.critic is not None and algorithm.critic.kind == "own" else 1


def _dtype_bytes(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _stored_bytes(config: RunConfig, sequences: int) -> int:
    return sequences * longest_sequence(config) * STORED_BYTES_PER_TOKEN


def _mb(size_bytes: float) -> int:
    return math.ceil(size_bytes / 2**20)


def gb(size_mb: int) -> str:
    """Return the size as text in GB."""
    return f"{size_mb / 1024:.1f} GB"
