"""Log-probs and entropies of tokens from hidden states, without ever holding the [R, V] logits of a
whole batch.

The learner's logits exist here and in kl.py's exact KL, nowhere else.
Position handling is not here: row i of `hidden` predicts `targets[i]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, *, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden head^T / temperature) at the targets, and the entropy of that
    distribution.

    hidden: [R, H]; head: [V, H]; targets: int64 [R] -> logprobs float32 [R], entropies float32 [R],
    both differentiable once. Logits exist for at most chunk_tokens rows at a time, in forward and
    backward; where all rows fit into one chunk they are kept instead of computed again.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, head, targets, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def chunk_logprobs(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden head^T / temperature): [C, H], [V, H] -> float32 [C, V]. Holds all its
    logits: give it few rows.
    """
    return _fill(
        _room(hidden, head, len(hidden)),
        _room(hidden, head, len(hidden)),
        hidden,
        head,
        temperature,
    )


def _room(hidden: Tensor, head: Tensor, num_rows: int) -> Tensor:
    return torch.empty(
        min(num_rows, len(hidden)), len(head), dtype=torch.float32, device=hidden.device
    )


def _fill(
    result: Tensor, scratch: Tensor, hidden: Tensor, head: Tensor, temperature: float
) -> Tensor:
    """Writes the log-probs of these rows into the first rows of `result`, returned in that size;
    logits pass through scratch.
    """
    result, scratch = result[: len(hidden)], scratch[: len(hidden)]
    if hidden.dtype is torch.float32:
        torch.mm(hidden, head.t(), out=scratch)
    else:
        scratch.copy_(hidden @ head.t())
    if temperature != 1.0:
        scratch /= temperature
    return torch.log_softmax(scratch, dim=-1, out=result)


class _TokenLogprobs(torch.autograd.Function):
    """With z the scaled logits, p their softmax, y the target: d logp_y / dz = 1_y - p and dH / dz
    = -p (log p + H).

    The two [C, V] matrices are used again for every chunk: new ones would leave gaps in memory,
    which cost as much again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        matrix, scratch = _room(hidden, head, chunk_tokens), _room(hidden, head, chunk_tokens)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            distribution = _fill(matrix, scratch, hidden[rows], head, temperature)
            logprobs[rows] = distribution.gather(1, targets[rows, None]).squeeze(1)
            probs = torch.exp(distribution, out=scratch[: len(distribution)])
            entropies[rows] = torch.linalg.vecdot(probs, distribution).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, head, targets, entropies, matrix if len(hidden) <= chunk_tokens else None
        )
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, head, targets, entropies, kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        matrix, scratch = (
            _room(hidden, head, ctx.chunk_tokens),
            _room(hidden, head, ctx.chunk_tokens),
        )
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            distribution = (
                kept
                if kept is not None
                else _fill(matrix, scratch, hidden[rows], head, ctx.temperature)
            )
            size, share = len(distribution), grad_logprobs[rows, None]
            grad_logits = torch.exp(distribution, out=scratch[:size])
            if grad_entropies is None:
                grad_logits.mul_(-share)
            else:
                pull = torch.add(distribution, entropies[rows, None], out=matrix[:size]).mul_(
                    grad_entropies[rows, None]
                )
                grad_logits.mul_(pull.add_(share).neg_())
            grad_logits.scatter_add_(1, targets[rows, None], share)
            if ctx.temperature != 1.0:
                grad_logits /= ctx.temperature
            if hidden.dtype is torch.float32:
                torch.mm(grad_logits, head, out=grad_hidden[rows])
                grad_head.addmm_(grad_logits.t(), hidden[rows])
            else:
                low = grad_logits.to(hidden.dtype)
                torch.mm(low, head, out=grad_hidden[rows])
                grad_head += low.t() @ hidden[rows]
        return grad_hidden, grad_head.to(head.dtype), None, None, None
