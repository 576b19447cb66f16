"""The memory of one learner rank: the largest sum of tensors that are alive at one moment.

The formulas follow the learner's own code: FSDP2 with the model's blocks as units, AdamW, packed
rows, log-probs in chunks. `benchmarks/learner/memory_plan.py` runs that code on tensors without
storage and compares; the estimate is within 10 percent of that account for GPUs.  estimate.py adds
the memory outside tensors (CUDA's context, the buffers of NCCL, gaps of the allocator).  Pure.
"""

from async_rl.config.learner import CACHE_TOKENS, MOMENTS_PIECE_BYTES, shard_ranks
from async_rl.config.run import MOST_CHANGED, RunConfig
from async_rl.core.frozen import frozen
from async_rl.planning.shape import ModelShape

FLOAT32_BYTES = 4
MOMENT_BYTES = 8  # AdamW's two moments in float32


@frozen
class LearnerMemory:
    """Bytes of one rank.

    kept: parameters and moments, between steps.  step: added by the largest moment of a step.
    offloaded: what learner.offload keeps in main memory.  published: the policy in the dtype of the
    generators, and the lists of its changed words where they are sent.  saved: the copy of the
    rank's state that a checkpoint writes.  loaded: float32 weights that are not sharded, while the
    rank starts.
    """

    kept: float
    step: float
    offloaded: float
    published: float
    saved: float
    loaded: float


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest sequence, prompt and response."""
    return config.data.max_prompt_tokens + config.data.max_response_tokens


def dtype_bytes(config: RunConfig) -> int:
    """Return the bytes of a value of the computation."""
    return 2 if config.model.dtype == "bfloat16" else FLOAT32_BYTES


def has_own_critic(config: RunConfig) -> bool:
    """Return whether a critic of the policy's size is trained."""
    critic = config.algorithm.critic
    return critic is not None and critic.kind == "own"


def policy_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters of the policy: all, or only its adapter's."""
    adapter = config.model.adapter
    if adapter is None:
        return shape.num_parameters
    hidden = shape.hidden_size
    mlp = shape.mlp_width
    sides = dict.fromkeys(("q_proj", "o_proj"), hidden + shape.query_width)
    sides |= dict.fromkeys(("k_proj", "v_proj"), hidden + shape.kv_width)
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + mlp)
    # Layers of other names count as the widest.
    chosen = [sides.get(name, hidden + mlp) for name in adapter.targets] or sides.values()
    return shape.num_layers * adapter.rank * sum(chosen)


def has_adapter(config: RunConfig) -> bool:
    """Return whether the policy's own weights are frozen."""
    return config.model.adapter is not None


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Return the trained parameters of policy and critic."""
    critic = shape.backbone_parameters if has_own_critic(config) else 0
    return policy_parameters(config, shape) + critic


def is_sharded(config: RunConfig) -> bool:
    """Return whether the models are wrapped by FSDP (learner/sharding.py)."""
    learner = config.learner
    return (
        learner.ranks > 1
        or learner.gpus_each > 0
        or config.model.dtype == "bfloat16"
        or learner.offload == "parameters"
    )


def learner_memory(config: RunConfig, shape: ModelShape) -> LearnerMemory:
    """Compute the memory of one rank."""
    ranks = config.learner.ranks
    shards = shard_ranks(shape.num_parameters, ranks=ranks, node_ranks=config.node_ranks)
    trained = trained_parameters(config, shape) / shards
    weights = FLOAT32_BYTES * trained + _frozen_bytes(config, shape) / shards
    moments = MOMENT_BYTES * trained
    # Policy and critic are updated one after the other.
    updated = policy_parameters(config, shape)
    if has_own_critic(config):
        updated = max(updated, shape.backbone_parameters)
    gradients = FLOAT32_BYTES * updated / shards
    offload = config.learner.offload
    kept = weights + moments
    offloaded = 0.0
    step = _step_bytes(config, shape)
    if offload == "optimizer":
        # One piece is on the device during an optimizer step (learner/optimizer.py).
        kept = weights
        offloaded = moments
        largest = MOMENT_BYTES * shape.vocab_size * shape.hidden_size / shards
        step = gradients + max(step, min(moments, max(MOMENTS_PIECE_BYTES, largest)))
    elif offload == "parameters":
        kept = 0.0
        offloaded = weights + moments + gradients
    else:
        step += gradients
    published: float = shape.num_parameters * dtype_bytes(config)
    kind = config.weights.transfer.kind
    is_broadcast = kind in {"auto", "collective"} and config.learner.gpus_each > 0
    # Lists of changed words (weights/tensors.py) are made for files and for broadcasts of GPUs.
    if dtype_bytes(config) == 2 and (kind == "filesystem" or is_broadcast):
        published *= 1 + 2 * MOST_CHANGED
    return LearnerMemory(
        kept=kept,
        step=max(step, _forward_bytes(config, shape)),
        offloaded=offloaded,
        published=published,
        saved=(FLOAT32_BYTES + MOMENT_BYTES) * trained,
        loaded=_loaded_bytes(config, shape),
    )


def _frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The weights of all ranks that are never trained."""
    reference = config.algorithm.reference
    # In float32: the base of an adapter, a reference that follows the policy in small steps.
    if has_adapter(config) or (reference and reference.ref_ema_eta):
        return FLOAT32_BYTES * shape.num_parameters
    return dtype_bytes(config) * shape.num_parameters if reference else 0.0


def _loaded_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The memory of weights that learner/loading.py has read and not yet sharded."""
    if is_sharded(config) and not shape.is_loaded_whole:
        # The first layers for the check of the architecture, or one unit that is read.
        return FLOAT32_BYTES * (shape.root_parameters + 2 * shape.layer_parameters)
    # Models are copied and sharded one after another; the policy is whole until the last.
    return FLOAT32_BYTES * shape.num_parameters * min(2, 1 + _num_copies(config))


def _has_reference(config: RunConfig) -> bool:
    """Whether a reference model is loaded; the base of an adapter is the reference too."""
    return config.algorithm.reference is not None and not has_adapter(config)


def _num_copies(config: RunConfig) -> int:
    """The models next to the policy: the critic's backbone and the reference."""
    return has_own_critic(config) + _has_reference(config)


def _pass_tokens(config: RunConfig, most: int) -> int:
    """The tokens of a pass that may have `most` of them: on a CPU fewer, that fit its cache."""
    if is_sharded(config):
        return most
    return min(most, max(CACHE_TOKENS, longest_sequence(config)))


def minibatch_tokens(config: RunConfig) -> int:
    """Return the tokens that the packed rows of a minibatch have at most, each prompt once in a row
    (learner/forward_passes.py). Samples of agents may be longer than the limits, so their batches
    are not bounded here.
    """
    if config.agent.is_used:
        return config.learner.budget_tokens
    groups = config.buffer.groups_per_step * config.buffer.uses_per_group
    parts = config.learner.minibatches
    prompt = config.data.max_prompt_tokens
    response = config.data.max_response_tokens
    group = prompt + config.generation.group_size * response
    # A part that gets the next bundle has at most the mean, and bundles of few prompts are divided.
    bundle = group
    total = groups * group
    if groups < 2 * parts:
        bundle = prompt + response
        total = groups * config.generation.group_size * bundle
    return min(groups * group, total // parts + bundle)


def _step_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The largest moment of a step beyond parameters, moments and gradients of the shards."""
    size = dtype_bytes(config)
    tokens = _pass_tokens(config, min(config.learner.budget_tokens, minibatch_tokens(config)))
    is_frozen = has_adapter(config) and not has_own_critic(config)
    layer = tokens * _layer_bytes(config, shape)
    kept = layer * shape.num_layers
    if config.learner.gradient_checkpointing:
        # The input of each layer, and one layer that is computed again.
        kept = tokens * shape.hidden_size * size * shape.num_layers
    else:
        layer = 0.0
    # The last norm, and the hidden states of the response tokens and their gradient.
    last = tokens * shape.hidden_size * (FLOAT32_BYTES + 5 * size)
    head = shape.vocab_size * shape.hidden_size
    unit = 0
    if is_sharded(config):
        # The gathered weights of a layer and of the next layer, and the layer's gradients on their
        # way.
        unit = shape.layer_parameters * (3 * size + FLOAT32_BYTES)
        if is_frozen:
            unit = shape.layer_parameters * 2 * size
    chunk = _chunk_bytes(config, shape)
    head_gradient = head * (FLOAT32_BYTES + size % FLOAT32_BYTES)
    if is_frozen:
        head_gradient = 0
    in_head = kept + last + chunk + head_gradient
    # In the backward pass of a layer: its gradients of the widest tensors.
    widest = 3 * FLOAT32_BYTES * shape.hidden_size + 2 * size * shape.mlp_width
    pulled = tokens * widest
    in_layer = kept + layer + pulled + unit
    if not is_frozen:
        in_layer += head * size
    # The gradients of the embeddings, and their sum over ranks in float32. The gathered weights
    # are released before.
    in_root = shape.root_parameters * FLOAT32_BYTES
    if is_frozen or not is_sharded(config):
        in_root = 0
    return _gathered_bytes(config, shape) + max(in_head, in_layer, in_root)


def _gathered_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The root units of all models, which stay gathered until their next backward pass; on one
    rank the layers of trained models too (learner/sharding.py), unless memory is short.
    """
    if not is_sharded(config):
        return 0.0
    roots = shape.root_parameters * (1 + _has_reference(config))
    roots += shape.vocab_size * shape.hidden_size * has_own_critic(config)
    learner = config.learner
    is_short = learner.gradient_checkpointing or learner.offload != "none"
    if learner.ranks == 1 and not is_short:
        roots += shape.num_layers * shape.layer_parameters * (1 + has_own_critic(config))
    return dtype_bytes(config) * roots


def _forward_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The largest moment of the passes without a gradient: no gradients and no other layers."""
    size = dtype_bytes(config)
    tokens = _pass_tokens(config, config.learner.forward_tokens)
    # Gate, up and their product next to the residual, its norm and the copies of both; the account
    # has the last hidden states of the models that ran before, too.
    widths = 3 * shape.mlp_width + (4 + _num_copies(config)) * shape.hidden_size
    # The weights of a layer and of the next one.
    return _gathered_bytes(config, shape) + size * (tokens * widths + 2 * shape.layer_parameters)


def _layer_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes that one layer keeps for its backward pass, per token."""
    size = dtype_bytes(config)
    # A norm keeps a float32 copy of its input, its output, and for the gradient of its weight the
    # output before it.
    before = 0 if has_adapter(config) else size
    norm = FLOAT32_BYTES + size + before
    norms = 2 * norm * shape.hidden_size
    query = 3.0 * size
    # On a GPU the keys of each response stand in one piece with a copy of its prompt's keys.
    is_copied = config.learner.gpus_each > 0 and config.generation.group_size > 1
    share = longest_sequence(config) / config.data.max_response_tokens if is_copied else 1.0
    key = 2 * size * share
    if shape.has_qk_norm:
        query += FLOAT32_BYTES + before
        key += FLOAT32_BYTES + before
    attention = query * shape.query_width + key * shape.kv_width
    # Gate, its activation, up, and their product.
    return norms + attention + 4 * size * shape.mlp_width


def _chunk_bytes(config: RunConfig, shape: ModelShape) -> float:
    """The logits of one chunk in a pass with a gradient: two matrices in float32, and copies in a
    smaller type, or on a CPU the head in float32; a KL in the loss needs the matrices of the
    reference too.
    """
    row = FLOAT32_BYTES * shape.vocab_size
    chunk = max(int(config.learner.logits_chunk_mb * 2**20), row)
    size = 2 * chunk
    if dtype_bytes(config) < FLOAT32_BYTES:
        size += chunk if config.learner.gpus_each > 0 else row * shape.hidden_size
    return size * (2 if config.algorithm.kl.kind == "loss" else 1)
