"""The models that the learner holds: policy, critic and reference, each fed with packed rows.

Invariants
- Parameters are float32; compute runs in the configured type.
- A loaded model is checked once against its own plain forward pass, so an architecture that packing
  or the head's shortcut would compute wrongly is refused at the start instead of trained wrongly.
Called by the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from async_rl.algorithms.kl import full_kl
from async_rl.algorithms.logprobs import token_logprobs
from async_rl.batching.batch import collate
from async_rl.batching.packing import Pass, pack
from async_rl.core.errors import ConfigError
from async_rl.learner.attention import use_segments
from async_rl.learner.fused import fuse
from async_rl.learner.rows import rows_as_group
from async_rl.learner.sharding import local, reshard

_TOLERANCE = 1e-3
"""Nats between packed and plain log-probs in float32; kernels differ by about 1e-5, a wrong mask or
head by far more.
"""


class Values(NamedTuple):
    """Values before each response token, and after each sequence's last token: float32 [R'],
    float32 [S], the latter detached.
    """

    here: Tensor
    after: Tensor


class PolicyOutput(NamedTuple):
    """Of each response token of a pass, float32 [R']: log-prob, entropy of its distribution, exact
    KL to the reference where asked for.

    values: those of the critic's head on the policy's backbone, where it has one.
    """

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor | None
    values: Values | None


class States(NamedTuple):
    """What the logits of a pass are made of: hidden [R', H], head [V, H]."""

    hidden: Tensor
    head: Tensor


def chunk_rows(chunk_mb: float, vocab_size: int) -> int:
    """How many rows of float32 logits fit into chunk_mb, at least one."""
    return max(1, int(chunk_mb * 2**20 / (4 * vocab_size)))


class Policy(nn.Module):
    """A causal language model that scores packed rows, and values them if it is given a head for
    that.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.value_head: nn.Linear | None = None

    def forward(
        self, row: Pass, *, temperature: float, chunk_tokens: int, reference: States | None = None
    ) -> PolicyOutput:
        """What the policy says of the row's response tokens; reference: the states of the model
        that the exact KL is taken to.
        """
        states = _hidden_states(self.lm.base_model, row)
        hidden, head = (
            states.index_select(0, row.predict_index),
            self.lm.get_output_embeddings().weight,
        )
        values = _values(self.value_head, states, row) if self.value_head is not None else None
        logprobs, entropies = token_logprobs(
            hidden,
            head=head,
            targets=row.target_ids,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )
        if reference is None:
            return PolicyOutput(logprobs, entropies, None, values)
        kl = full_kl(
            hidden,
            head=head,
            ref_hidden=reference.hidden,
            ref_head=reference.head,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )
        return PolicyOutput(logprobs, entropies, kl, values)

    def states(self, row: Pass) -> States:
        """The states from which the logits of the row's response tokens follow."""
        hidden = _hidden_states(self.lm.base_model, row).index_select(0, row.predict_index)
        return States(hidden, self.lm.get_output_embeddings().weight)

    def chunk_tokens(self, chunk_mb: float) -> int:
        """How many tokens' logits fit into chunk_mb."""
        return chunk_rows(chunk_mb, self.lm.config.get_text_config().vocab_size)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the language model under their Hugging Face names; tied ones once."""
        yield from self.lm.named_parameters()


class Critic(nn.Module):
    """A value head on a backbone of its own, copied from the policy. Its values start at 0."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(lm.base_model)
        self.head = value_head(lm)

    def forward(self, row: Pass) -> Values:
        """The values of a pass."""
        return _values(self.head, _hidden_states(self.backbone, row), row)


def value_head(lm: PreTrainedModel) -> nn.Linear:
    """What makes values of the model's hidden states; 0 at first."""
    head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _values(head: nn.Linear, hidden: Tensor, row: Pass) -> Values:
    index = torch.cat([row.predict_index, row.last_index])
    values = head(hidden.index_select(0, index)).squeeze(-1).float()
    here, after = values.split([len(row.predict_index), len(row.last_index)])
    return Values(here.clone(), after.detach().clone())  # FSDP does not like views as results


def _hidden_states(backbone: nn.Module, row: Pass) -> Tensor:
    """[T, H]."""
    output = backbone(
        input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, segments=row.layout
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def load_policy(
    path: Path, *, trust_remote_code: bool, gradient_checkpointing: bool, is_fused: bool
) -> Policy:
    """Load a causal LM in float32, with the modules of `fused` where they apply if is_fused.

    Raises ConfigError if it cannot be loaded, or computes something else on packed rows.
    """
    disable_progress_bar()
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path} is not a causal language model that transformers loads: {error}"
        ) from error
    lm.eval()
    expected = _plain_logprobs(lm)
    use_segments(lm)
    if is_fused:
        fuse(lm)
    policy = Policy(lm)
    _check(policy, expected, path)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _disable_dropout(lm)
        lm.train()
    return policy


_PROBE = ((3, 1, 4, 1, 5, 9, 2), (3, 1, 4, 1, 6, 5), (2, 7, 1, 8))


@torch.no_grad()
def _plain_logprobs(lm: PreTrainedModel) -> Tensor:
    """Log-probs of the probe rows by the model's own forward pass and its own attention."""
    parts = []
    for row in _PROBE:
        ids = torch.tensor([row])
        logits = lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)[2:])
    return torch.cat(parts)


@torch.no_grad()
def _check(policy: Policy, expected: Tensor, path: Path) -> None:
    rows = [np.array(row, dtype=np.int32) for row in _PROBE]
    device = torch.device("cpu")
    batch = collate([rows_as_group(rows, prompt_length=3)], device=device)
    row = pack(batch, range(len(rows)), device=device)
    try:
        found = policy(row, temperature=1.0, chunk_tokens=1024).logprobs
    except (NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"model.path={path}: {type(policy.lm).__name__} cannot be trained on packed rows:"
            f" {error}"
        ) from error
    worst = float((found - expected).abs().max())
    if not worst <= _TOLERANCE:
        raise ConfigError(
            f"model.path={path}: {type(policy.lm).__name__} gives log-probs that differ by"
            f" {worst:.2g} nats on packed rows (more than {_TOLERANCE:g}), so its attention or"
            " output head is of a kind that the learner does not support"
        )


def _disable_dropout(lm: PreTrainedModel) -> None:
    """Training mode is needed for checkpointing only; ratios need the same function in every pass."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lm.config.attention_dropout = 0.0


def frozen_copy(policy: Policy) -> Policy:
    """The reference: the same model, never trained."""
    return copy.deepcopy(policy).eval().requires_grad_(False)


@torch.no_grad()
def follow(reference: Policy, policy: Policy, *, share: float) -> None:
    """reference <- share x policy + (1 - share) x reference, shard by shard."""
    for mine, theirs in zip(reference.lm.parameters(), policy.lm.parameters(), strict=True):
        local(mine).lerp_(local(theirs), share)
    reshard(reference)
