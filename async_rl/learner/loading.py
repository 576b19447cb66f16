"""Load the models from a Hugging Face directory and check the policy on packed rows.

Invariant: a loaded model equals its own plain forward pass within TOLERANCE; of a sharded model
the first layers are compared. An architecture that packed rows or the direct use of the output head
would compute wrongly is rejected at the start, not trained wrongly.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from async_rl.algorithms.compiling import Compilation
from async_rl.batching.packing import pack_rows
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.learner.attention import use_segments
from async_rl.learner.context import divide_ranks
from async_rl.learner.models import BasePolicy, Critic, LearnerModels, Policy, ValueHead
from async_rl.learner.pretrained import PretrainedWeights
from async_rl.learner.sharding import Ranks
from async_rl.weights.lora import add_adapter

# Nats between packed and plain log-probs in float32. Kernels differ by about 1e-5, a wrong mask or
# head by far more.
TOLERANCE = 1e-3

# Two rows share a prompt of three tokens, so the check covers attention to a shared prompt.
_PROBE = ((3, 1, 4, 1, 5, 9, 2), (3, 1, 4, 1, 6, 5), (2, 7, 1, 8))
_PROBE_PROMPT = 3


def ranks_of(config: RunConfig, *, rank: int, world_size: int, device: torch.device) -> Ranks:
    """Return this process's view of the learner's ranks (collective)."""
    learner = config.learner
    units = learner.shard_units
    context, data_group = divide_ranks(world_size, learner.context_ranks, device)
    return Ranks(
        rank=rank,
        world_size=world_size,
        context=context,
        data_group=data_group,
        device=device,
        dtype=getattr(torch, config.model.dtype),
        min_shard_params=0 if isinstance(units, list) else units,
        offload=learner.offload,
        is_short_of_memory=learner.gradient_checkpointing,
        node_ranks=config.node_ranks,
    )


def load_models(config: RunConfig, path: Path, ranks: Ranks) -> LearnerModels:
    """Load and shard the models of a run. Raises ConfigError as `load_policy` does."""
    critic = config.algorithm.critic
    reference = config.algorithm.reference
    has_own_backbone = critic is not None and critic.kind == "own"
    max_tokens = config.data.max_response_tokens
    policy, weights = _open_policy(config, path, ranks)
    if critic is not None and not has_own_backbone:
        policy.value_head = ValueHead(policy.lm, max_tokens=max_tokens)
    blocks = _blocks(config.learner.shard_units, policy)

    def shard(model: nn.Module, part: nn.Module, prefix: str, dtype: torch.dtype) -> None:
        fill = None
        if weights is not None:
            names = {p: prefix + name for name, p in part.named_parameters()}
            fill = functools.partial(weights.fill, names=names, dtype=dtype)
        # Before: FSDP changes the class of its units.
        own_blocks = [m for m in model.modules() if type(m).__name__ in blocks]
        is_trained = any(p.requires_grad for p in model.parameters())
        ranks.shard(model, blocks, fill=fill, stays_gathered=is_trained)
        if isinstance(model, Policy):
            register_fsdp_forward_method(model, "states")
        # On a CPU compiling takes longer than it saves, and attention has another plan per row.
        if ranks.device.type == "cuda":
            compile_blocks(own_blocks)

    # The policy last: FSDP's wrappers cannot be copied. Each copy is sharded before the next is
    # made, so that at most two whole models are in main memory if they are loaded whole.
    adapter = config.model.adapter
    frozen: Policy | BasePolicy | None = None
    if reference is not None and adapter is None:
        # A reference that follows the policy in small steps needs float32.
        dtype = torch.float32 if reference.ref_ema_eta else ranks.dtype
        frozen = policy.frozen_copy(dtype)
        shard(frozen, frozen.lm, "", dtype)
    critic_model = None
    if has_own_backbone:
        # Before the adapter is added: all weights of a critic are trained.
        critic_model = Critic(policy.lm, max_tokens=max_tokens, context=ranks.context)
        prefix = f"{policy.lm.base_model_prefix}."
        shard(critic_model, critic_model.backbone, prefix, torch.float32)
    if adapter is not None:
        add_adapter(policy.lm, adapter)
    shard(policy, policy.lm, "", torch.float32)
    if reference is not None and adapter is not None:
        frozen = BasePolicy(policy)
    return LearnerModels(policy=policy, reference=frozen, critic=critic_model)


def _open_policy(
    config: RunConfig, path: Path, ranks: Ranks
) -> tuple[Policy, PretrainedWeights | None]:
    """Load the policy whole, or open its weights and return it without values."""
    weights = None
    if ranks.is_sharded:
        weights = PretrainedWeights.open(path, trust_remote_code=config.model.trust_remote_code)
    if weights is None:
        policy = load_policy(path, trust_remote_code=config.model.trust_remote_code)
    else:
        if ranks.rank == 0:
            # The other ranks have the same model; their first collective waits for this one.
            _checked(weights.first_layers(), path)
        policy = _prepared(weights.empty_model())
    heads = policy.lm.config.get_text_config().num_attention_heads
    if heads % ranks.context.size:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"learner.context_ranks={ranks.context.size} does not divide the {heads} attention"
            f" heads of {type(policy.lm).__name__}: each rank computes the attention of a part of"
            f" them; set learner.context_ranks to one of {', '.join(map(str, divisors))}"
        )
    policy.context = ranks.context
    if config.learner.gradient_checkpointing:
        recompute_activations(policy.lm)
    return policy, weights


def _blocks(shard_units: int | list[str], policy: Policy) -> Sequence[str]:
    """Return the classes of the modules that are shard units. Raises ConfigError if the model does
    not have a named one.
    """
    if not isinstance(shard_units, list):
        return policy.lm._no_split_modules or ()
    classes = {type(module).__name__ for module in policy.lm.modules()}
    missing = set(shard_units) - classes
    if missing:
        raise ConfigError(
            f"learner.shard_units: the model has no module of the class {', '.join(missing)}; it"
            f" has {', '.join(sorted(classes))}"
        )
    return shard_units


def load_policy(path: Path, *, trust_remote_code: bool) -> Policy:
    """Load a causal language model in float32.

    Raises ConfigError if the model cannot be loaded, or if it computes different log-probs on
    packed rows.
    """
    # The bars of several ranks would overwrite each other in one log.
    disable_progress_bar()
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path} is not a causal language model that transformers can load: {error};"
            " set model.path to a directory with config.json and weights"
        ) from error
    return _checked(lm, path)


@torch.no_grad()
def _checked(lm: PreTrainedModel, path: Path) -> Policy:
    """Return the policy after the comparison of its packed rows with its plain forward pass."""
    lm.eval()
    expected = _plain_logprobs(lm)
    policy = _prepared(lm)
    rows = [np.array(row, dtype=np.int32) for row in _PROBE]
    row = pack_rows(rows, prompt_length=_PROBE_PROMPT, device=torch.device("cpu"))
    architecture = type(policy.lm).__name__
    try:
        logprobs = policy(row, temperature=1.0, chunk_tokens=1024).logprobs
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.path={path}: {architecture} cannot be trained on packed rows: {error}; use a"
            " model with standard attention"
        ) from error
    worst = float((logprobs - expected).abs().max())
    # Negated, so that NaN is rejected too.
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"model.path={path}: the log-probs of {architecture} differ by {worst:.2g} nats on"
            f" packed rows (more than {TOLERANCE:g}), because the learner does not support its"
            " attention or output head; use another architecture"
        )
    return policy


def _prepared(lm: PreTrainedModel) -> Policy:
    # Dropout would make two passes over one row differ.
    lm.eval()
    use_segments(lm)
    return Policy(lm)


def _plain_logprobs(lm: PreTrainedModel) -> Tensor:
    """Compute the probe's log-probs by the model's own forward pass with its own attention."""
    parts = []
    for row in _PROBE:
        ids = torch.tensor([row])
        logits = lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
        parts.append(logprobs[_PROBE_PROMPT - 1 :])
    return torch.cat(parts)


def recompute_activations(lm: PreTrainedModel) -> None:
    """Let the backward pass compute activations again, which saves their memory."""
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Training mode is needed for checkpointing only: without dropout, because ratios of log-probs
    # need the same function in every pass.
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lm.config.attention_dropout = 0.0


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make the blocks compile at their first call; they may be sharded already.

    A block that is divided into several units of FSDP, or that has experts, is left as it is.
    """
    compilation = Compilation()
    for block in blocks:
        # Experts get tokens by the values of a router, which a graph cannot; their matrices are
        # stacked in one tensor.
        has_experts = any(p.ndim > 2 for p in block.parameters())
        is_divided = any(isinstance(m, FSDPModule) for m in block.modules() if m is not block)
        if not has_experts and not is_divided:
            # Not the module: the hooks of FSDP and of checkpointing stay outside of the graph.
            block.forward = compilation.of(block.forward)


def learner_device(gpus: float) -> torch.device:
    """Return the one GPU that this rank sees, or the CPU. Raises ConfigError without CUDA."""
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_each={gpus:g} but torch {torch.__version__} finds no CUDA GPU here:"
            " install its CUDA build (pip install .[gpu]), repair the driver (nvidia-smi), or set"
            " learner.gpus_each=0"
        )
    return torch.device("cuda", 0)
