"""The models of the learner: policy, critic and reference, each run on packed rows.

Invariant: parameters are float32; computation uses the configured type. Loading, and the check of
a model against its own plain forward pass, are in loading.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rl.algorithms.logprobs import chosen_logprobs, token_logprobs
from async_rl.batching.packing import NUM_INPUTS, Pass
from async_rl.core.frozen import frozen
from async_rl.learner.attention import plan
from async_rl.learner.context import WHOLE_ROWS, Context, Piece
from async_rl.learner.sharding import local, reshard
from async_rl.weights.lora import without_adapter


class Values(NamedTuple):
    """The values of a pass.

    at_tokens: float32 [R'], before each response token; after_end: float32 [S], after the last
    token of each sequence, without gradient.
    """

    at_tokens: Tensor
    after_end: Tensor


class PolicyOutput(NamedTuple):
    """The outputs of the policy for the R' response tokens of a pass, or of all models for the R
    tokens of a batch, before the update.

    logprobs, entropies: float32 [R']; kl, ref_logprobs: float32 [R'], the exact KL to the reference
    and its log-probs, or None; values: in the critic's unit, or None. Of a pass they are the values
    of the head on the policy's backbone. Passes fill the tensors of a batch in place;
    `values.after_end` has a number for each of its B sequences, 0 for those of other ranks.
    """

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor | None
    ref_logprobs: Tensor | None
    values: Values | None


class States(NamedTuple):
    """The factors of the logits of a pass: hidden [R', H] and head [V, H]."""

    hidden: Tensor
    head: Tensor


class Policy(nn.Module):
    """A causal language model on packed rows.

    context: the ranks that share its rows; value_head: on its backbone, None without one.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.context = WHOLE_ROWS
        self.value_head: ValueHead | None = None
        self._divisor = _logits_divisor(lm)

    def forward(
        self, row: Pass, *, temperature: float, chunk_tokens: int, reference: States | None = None
    ) -> PolicyOutput:
        """Compute the outputs for the row's response tokens.

        reference: the states of the reference; None = no KL.
        """
        piece, states = _hidden_states(self.lm.base_model, row, self.context)
        hidden = states.index_select(0, piece.row.predict_index)
        values = None
        # Rows whose log-probs alone are read are packed without them.
        if self.value_head is not None and row.value_inputs is not None:
            values = _values(self.value_head, states, piece, self.context)
        outputs = token_logprobs(
            hidden,
            head=self._head(),
            targets=piece.row.target_ids,
            temperature=temperature * self._divisor,
            chunk_tokens=chunk_tokens,
            edits=piece.row.edits,
            reference=reference,
        )
        logprobs, entropies = (self.context.join(x, piece.tokens) for x in outputs[:2])
        kl, ref_logprobs = (
            None if x is None else self.context.join(x, piece.tokens) for x in outputs[2:]
        )
        return PolicyOutput(logprobs, entropies, kl, ref_logprobs, values)

    def states(self, row: Pass) -> States:
        """Compute the factors of the logits of the response tokens in this rank's piece."""
        piece, hidden = _hidden_states(self.lm.base_model, row, self.context)
        return States(hidden.index_select(0, piece.row.predict_index), self._head())

    def chosen_logprobs(self, row: Pass, targets: Tensor, *, chunk_tokens: int) -> Tensor:
        """Compute the log-probs of K tokens at each response token of a whole row, at temperature
        1: int64 [R', K] -> float32 [R', K].
        """
        states = self.states(row)
        return chosen_logprobs(
            states.hidden,
            head=states.head,
            targets=targets,
            temperature=self._divisor,
            chunk_tokens=chunk_tokens,
        )

    def _head(self) -> Tensor:
        weight: Tensor = self.lm.get_output_embeddings().weight
        return weight

    def chunk_tokens(self, chunk_mb: float) -> int:
        """Return the number of tokens whose float32 logits fit into chunk_mb, at least one."""
        vocab_size = self.lm.config.get_text_config().vocab_size
        return max(1, int(chunk_mb * 2**20 / (4 * vocab_size)))

    def frozen_copy(self, dtype: torch.dtype) -> Policy:
        """Return the reference: the same language model, never trained and without a value head."""
        # A copy in memory: reading the files again would be slower, and hold two models as well.
        frozen = Policy(copy.deepcopy(self.lm)).eval().requires_grad_(False)
        frozen.context = self.context
        for parameter in frozen.parameters():
            # The parameter object stays, so tied weights stay tied.
            parameter.data = parameter.data.to(dtype)
        return frozen


class BasePolicy:
    """The policy without its adapter, as the reference: it needs no second model."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def states(self, row: Pass) -> States:
        """Compute as Policy."""
        # The same module: a second model would double the memory of the weights.
        with without_adapter(self._policy):
            return self._policy.states(row)


class Critic(nn.Module):
    """A value head on its own backbone, which is a copy of the policy's. Its values start at 0."""

    def __init__(self, lm: PreTrainedModel, *, max_tokens: int, context: Context) -> None:
        super().__init__()
        # The backbone of the policy: both models then have one tokenizer and one start.
        self.backbone = copy.deepcopy(lm.base_model)
        self.head = ValueHead(lm, max_tokens=max_tokens)
        self._context = context

    def forward(self, row: Pass) -> Values:
        """Compute the values before each response token and after each sequence."""
        piece, states = _hidden_states(self.backbone, row, self._context)
        return _values(self.head, states, piece, self._context)


@frozen
class LearnerModels:
    """The models of a run. reference: None without a KL; critic: None without its own backbone."""

    policy: Policy
    reference: Policy | BasePolicy | None
    critic: Critic | None

    @property
    def has_values(self) -> bool:
        """True if there is a critic, with its own backbone or on the policy's."""
        return self.critic is not None or self.policy.value_head is not None

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the models there are."""
        for model in (self.policy, self.reference, self.critic):
            if isinstance(model, nn.Module):
                yield model


def _logits_divisor(lm: PreTrainedModel) -> float:
    """Return what the model divides its logits by: logits_scaling in Granite, 1 / logit_scale in
    Cohere.
    """
    fields = lm.config.get_text_config().to_dict()
    scale = fields.get("logit_scale")
    # The names of other models' scales are text; the check of loading.py refuses them.
    return float(fields.get("logits_scaling", 1.0)) / (scale if isinstance(scale, float) else 1.0)


class ValueHead(nn.Module):
    """A linear map from hidden states and `value_inputs` to values, 0 at first.

    max_tokens: of a response; the number of its tokens becomes a share of them.
    """

    def __init__(self, lm: PreTrainedModel, *, max_tokens: int) -> None:
        size = lm.config.get_text_config().hidden_size
        super().__init__()
        # Values of 0 leave the first advantages as they are.
        self.weight = nn.Parameter(torch.zeros(1, size))
        self.bias = nn.Parameter(torch.zeros(1))
        self.of_inputs = nn.Parameter(torch.zeros(1, NUM_INPUTS))
        # AdamW changes every weight by about the learning rate in a step. At this scale the inputs
        # can move a value as fast as the hidden state can, whose entries are about 1.
        scale = size / NUM_INPUTS
        self._units = [scale / max_tokens, *[scale] * (NUM_INPUTS - 1)]

    def forward(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Compute values: float32 or bfloat16 [N, H], float32 [N, NUM_INPUTS] -> the dtype of
        hidden [N].
        """
        scaled = (inputs * inputs.new_tensor(self._units)).to(hidden.dtype)
        of_hidden = nn.functional.linear(hidden, self.weight, self.bias)
        return (of_hidden + scaled @ self.of_inputs.t()).squeeze(-1)


def _values(head: ValueHead, hidden: Tensor, piece: Piece, context: Context) -> Values:
    row = piece.row
    assert row.value_inputs is not None, "rows for a critic have them"
    index = torch.cat([row.predict_index, row.last_index])
    values = head(hidden.index_select(0, index), row.value_inputs[index]).float()
    at_tokens, after_end = values.split([len(row.predict_index), len(row.last_index)])
    # FSDP's hooks do not accept views as results.
    at_tokens = context.join(at_tokens.clone(), piece.tokens)
    return Values(at_tokens, context.join(after_end.detach().clone(), piece.ends))


def _hidden_states(backbone: nn.Module, row: Pass, context: Context) -> tuple[Piece, Tensor]:
    """Run the backbone on this rank's piece of a packed row; return the piece and [T, H]."""
    piece = context.piece(row)
    whole = plan(row.segments, row.input_ids.device)
    output = backbone(
        input_ids=piece.row.input_ids,
        position_ids=piece.row.position_ids,
        # A cache of keys is for sampling; here it would keep all layers in memory.
        use_cache=False,
        segments=context.plan(whole, row.input_ids.shape[1]),
    )
    return piece, output.last_hidden_state[0]


@torch.no_grad()
def follow(reference: Policy, policy: Policy, *, share: float) -> None:
    """Move the reference towards the policy, shard by shard.

    reference <- share x policy + (1 - share) x reference
    """
    # Gathered weights are a copy, which the next pass replaces.
    for model in (reference, policy):
        reshard(model)
    pairs = zip(reference.lm.parameters(), policy.lm.parameters(), strict=True)
    for target, source in pairs:
        local(target).lerp_(local(source), share)
