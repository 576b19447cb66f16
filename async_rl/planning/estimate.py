"""What a run amounts to before it starts: groups, sequences and tokens per step, the staleness
bound, memory and disk. Pure.

Invariants: estimates are upper bounds of what a healthy run uses, within a factor of about two;
they refuse only what cannot fit. Used by `--dry-run` and by launchers/configuration/preflight.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config.learner import LearnerConfig
from async_rl.config.pools import (
    config_of,
    generator_pools,
    in_words_of,
    own_settings,
    pool_counts,
    work_of,
)
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
    """The sizes of the policy that decide memory. max_positions: longest sequence it can take."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    kv_width: int
    max_positions: int


def embedded_shape(*, hidden_size: int, num_layers: int, num_heads: int) -> ModelShape:
    """The shape of the embedded model; its vocabulary is at most EMBEDDED_VOCABULARY."""
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
    """The shape told by a Hugging Face config.json of a decoder-only model. Raises KeyError if it
    does not tell.
    """
    vocab, hidden, layers = (
        hf_config["vocab_size"],
        hf_config["hidden_size"],
        hf_config["num_hidden_layers"],
    )
    heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hidden // heads
    kv_width = (hf_config.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
    per_layer = attention + 3 * hidden * hf_config["intermediate_size"] + 2 * hidden
    embeddings = vocab * hidden * (1 if hf_config.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_parameters=embeddings + layers * per_layer + hidden,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        kv_width=kv_width,
        max_positions=hf_config["max_position_embeddings"],
    )


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest sequence, prompt and response."""
    return config.data.max_prompt_tokens + config.data.max_response_tokens


def max_groups_in_flight(config: RunConfig) -> int:
    """Training groups issued, generating, ready or leased at one time: what admission lets in."""
    return (config.buffer.max_staleness_versions + 1) * config.buffer.groups_per_step


def kv_cache_tokens(config: RunConfig, shape: ModelShape) -> int:
    """Tokens whose keys and values fit into kv_cache_mb."""
    return (
        config.generation.vllm.kv_cache_mb
        * 2**20
        // (2 * shape.num_layers * shape.kv_width * _dtype_bytes(config))
    )


def memory_mb(config: RunConfig, role: Role, shape: ModelShape | None) -> int:
    """RAM of one process of the role; without GPUs everything is RAM. An unknown shape counts the
    libraries alone.
    """
    base = BASE_MB[role]
    match role:
        case "supervisor":
            return base + (TENSORBOARD_MB if config.monitoring.tensorboard else 0)
        case "buffer":
            return base + _mb(
                max_groups_in_flight(config)
                * config.generation.group_size
                * longest_sequence(config)
                * STORED_BYTES_PER_TOKEN
            )
        case "verifier":
            return base + config.verifiers.cells * config.sandbox.memory_mb
        case "generator":
            return (
                base
                + config.generation.vllm.kv_cache_mb
                + (_mb(2 * shape.num_parameters * _dtype_bytes(config)) if shape else 0)
            )
        case "learner":
            return base + (_learner_mb(config, shape) if shape else 0)


def _num_trained(learner: LearnerConfig) -> int:
    """Models of the policy's size that are trained."""
    return 2 if learner.critic.enabled and learner.critic.backbone == "own" else 1


def _learner_mb(config: RunConfig, shape: ModelShape) -> int:
    learner, algorithm = config.learner, config.algorithm
    per_parameter = TRAINED_BYTES * _num_trained(learner) + (
        FLOAT32_BYTES if algorithm.kl_coef > 0 else 0
    )
    sharded = shape.num_parameters * per_parameter / learner.ranks
    # A push gathers the float32 weights and writes the published form beside them.
    pushed = shape.num_parameters * (FLOAT32_BYTES + _dtype_bytes(config))
    kept_layers = 1 if learner.gradient_checkpointing else shape.num_layers
    activations = (
        learner.budget_tokens
        * shape.hidden_size
        * (ACTIVATION_VALUES * kept_layers + shape.num_layers)
        * FLOAT32_BYTES
    )
    logits = 3 * int(learner.logits_chunk_mb * 2**20)
    # Responses that share a prompt attend through a dense mask, and in bfloat16 through a copy of
    # it.
    masks = (
        learner.budget_tokens
        * longest_sequence(config)
        * (FLOAT32_BYTES + _dtype_bytes(config) % FLOAT32_BYTES)
    )
    return _mb(
        sharded + pushed + activations + logits + (masks if config.generation.group_size > 1 else 0)
    )


def total_memory_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """RAM of the whole run on one machine."""
    counts: Mapping[Role, int] = {
        "supervisor": 1,
        "buffer": 1,
        "verifier": config.verifiers.count,
        "learner": config.learner.ranks,
    }
    generators = (config_of(config, pool) for pool in generator_pools(config))
    of_generators = sum(
        own.generators.count * memory_mb(own, "generator", shape) for own in generators
    )
    return of_generators + sum(
        count * memory_mb(config, role, shape) for role, count in counts.items()
    )


def disk_mb(config: RunConfig, shape: ModelShape | None) -> int:
    """Disk that the run's directory needs until its end: checkpoints (one being written), the
    store, logs.
    """
    trained = _num_trained(config.learner) * shape.num_parameters if shape else 0
    checkpoints = (config.checkpoint.keep + config.checkpoint.keep_best + 1) * trained * SAVED_BYTES
    sequences = config.num_steps * config.buffer.groups_per_step * config.generation.group_size
    return LOGS_MB + _mb(
        checkpoints + sequences * longest_sequence(config) * STORED_BYTES_PER_TOKEN
    )


def derived_numbers(config: RunConfig, shape: ModelShape | None) -> list[tuple[str, str]]:
    """What follows from the settings, for people: (what, how much)."""
    groups, size = config.buffer.groups_per_step, config.generation.group_size
    sequences = groups * size
    bound = config.buffer.max_staleness_versions
    rows = [
        ("groups per step", f"{groups}"),
        ("sequences per step", f"{sequences} ({groups} groups x {size})"),
        (
            "tokens per step",
            (
                f"at most {sequences * longest_sequence(config):,}"
                f" ({sequences * config.data.max_response_tokens:,} generated)"
            ),
        ),
        ("optimizer updates per step", f"{config.learner.minibatches * config.learner.epochs}"),
        (
            "staleness bound",
            f"{bound} versions = at most {max_groups_in_flight(config)} groups in flight"
            + (" (synchronous)" if bound == 0 else ""),
        ),
        ("groups generating", f"at most {_groups_generating(config)}"),
        *_pools(config),
        *_turns(config),
        ("sequences of the run", f"{config.num_steps * sequences:,} in {config.num_steps} steps"),
        ("evaluations", _evaluations(config)),
    ]
    if shape is None:
        return [
            *rows,
            ("model", "not on this machine, size unknown"),
            ("memory estimate", f"{_gb(total_memory_mb(config, None))} and the model"),
        ]
    rows.append(("model", f"{shape.num_parameters / 1e6:,.2f} M parameters"))
    if config.generation.engine == "vllm" and config.generation.vllm.kv_cache_mb:
        rows.append(("KV cache", f"{kv_cache_tokens(config, shape):,} tokens per generator"))
    if config.placement == "colocated" and config.learner.gpus_each > 0:
        rows.append(
            (
                "GPU memory",
                f"{_gb(_learner_mb(config, shape))} in the learner's turn, then in main memory",
            )
        )
    rows.append(("memory estimate", _gb(total_memory_mb(config, shape))))
    rows.append(("disk estimate", _gb(disk_mb(config, shape))))
    return rows


def _groups_generating(config: RunConfig) -> int:
    """Training groups that the generators have room for."""
    training = (
        config_of(config, pool)
        for pool in generator_pools(config)
        if work_of(config, pool) != "evaluation"
    )
    return sum(own.generators.count * own.generation.max_concurrent_groups for own in training)


def _pools(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What differs from pool to pool, if there is more than one."""
    counts = pool_counts(config)
    for pool in generator_pools(config) if config.generators.pools else ():
        differs = [
            f"{name}={value}"
            for name, value in own_settings(config, pool).items()
            if name != "count"
        ]
        work = {"train": "train", "evaluation": "evaluate", "both": "train and evaluate"}[
            work_of(config, pool)
        ]
        yield f"pool {pool}", ", ".join([f"{counts[pool]} that {work}", *differs])


def _turns(config: RunConfig) -> list[tuple[str, str]]:
    if config.placement != "colocated":
        return []
    steps = config.weights.push_every_steps
    groups = steps * config.buffer.groups_per_step
    return [
        (
            "placement",
            (
                f"colocated: generation until {groups} groups are ready, then {steps} learner"
                f" step{'s' * (steps > 1)}, in turns"
            ),
        )
    ]


def _evaluations(config: RunConfig) -> str:
    every = config.evaluation.every_steps
    if every == 0:
        return "none"
    prompts = config.evaluation.num_prompts or "all"
    times = 1 + math.ceil(config.num_steps / every)
    return f"{times} of {prompts} held-out prompts: at step 0, every {every} steps, at the end"


def fit_problems(config: RunConfig, shape: ModelShape, *, memory_mb_available: int) -> list[str]:
    """What cannot fit: sequences into the model or the KV cache, the run into memory."""
    found = []
    data, longest = config.data, longest_sequence(config)
    if longest > shape.max_positions:
        found.append(
            f"data.max_prompt_tokens={data.max_prompt_tokens} +"
            f" data.max_response_tokens={data.max_response_tokens} = {longest} is above the"
            f" {shape.max_positions} positions of the model; lower one of them"
        )
    for pool in generator_pools(config) if config.generation.engine == "vllm" else ():
        own = config_of(config, pool)
        size_mb, num_tokens = own.generation.vllm.kv_cache_mb, kv_cache_tokens(own, shape)
        if size_mb and num_tokens < longest:
            problem = (
                f"generation.vllm.kv_cache_mb={size_mb} holds {num_tokens} tokens of this model,"
                f" one sequence may have {longest}; raise it to at least"
                f" {math.ceil(size_mb * longest / max(num_tokens, 1))}"
            )
            found.append(in_words_of(pool, config, problem))
    found = list(dict.fromkeys(found))
    if (total := total_memory_mb(config, shape)) > memory_mb_available:
        found.append(
            f"the run needs about {_gb(total)} of memory, this machine has"
            f" {_gb(memory_mb_available)}; lower generators.count, learner.budget_tokens or"
            " generation.vllm.kv_cache_mb, or take a smaller model"
        )
    return found


def _dtype_bytes(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _mb(size_bytes: float) -> int:
    return math.ceil(size_bytes / 2**20)


def _gb(size_mb: int) -> str:
    return f"{size_mb / 1024:.1f} GB"
