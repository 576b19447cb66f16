"""Log-probs and entropies on a GPU: the logits of all rows and a block of the vocabulary at a time.

On a GPU the time is the traffic of the logits, so each block is written once by the product with
the head and read once or twice, by one kernel.  Blocks of the vocabulary and not of the rows: the
gradient of the head is complete with its block, and is never read again to be added to.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from async_rl.algorithms.compiling import Compilation
from async_rl.algorithms.logits import product

# Products want columns in multiples of a tile.
_TILE = 128


def fused_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, largest: int
) -> tuple[Tensor, Tensor]:
    """Compute `logprobs.token_logprobs` with blocks of at most `largest` logits.

    The log-prob of a target outside the vocabulary is -inf, because no kernel can raise.
    """
    logprobs, entropies = _FusedLogprobs.apply(hidden, head, targets, temperature, largest)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _FusedLogprobs(torch.autograd.Function):
    """With z the scaled logits, m their maximum, s = sum of exp(z - m), t = sum of exp(z - m) z:
      log p_y = z_y - m - log s,   H = m + log s - t / s
    summed over blocks with a running m (online softmax, arXiv 1805.02867 alg. 3).  It has the
    gradients of `logprobs`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, largest: int
    ) -> tuple[Tensor, Tensor]:
        scale = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
        zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        lowest = torch.full_like(zeros, -torch.inf)
        state = (lowest, zeros, zeros, lowest)
        blocks = list(_blocks(len(head), len(hidden), largest))
        kept = None
        for block in blocks:
            logits = product(hidden, head[block].t())
            state = _run(_add_block, hidden)(logits, targets - block.start, scale, *state)
            # One block: it is in memory anyway, and backward would compute it again.
            kept = logits if len(blocks) == 1 else None
            # Before the next block, so that two are never in memory.
            del logits
        highest, total, weighted, of_targets = state
        log_total = highest + total.log()
        logprobs = of_targets - log_total
        entropies = log_total - weighted / total
        # Without this, an entropy that no loss uses would arrive in backward as zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, head, targets, scale, entropies, log_total, kept)
        ctx.largest = largest
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, scale, entropies, log_total, kept = ctx.saved_tensors
        of_logprobs, of_entropies = (torch.zeros_like(entropies) if g is None else g for g in grads)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        # A frozen head, as next to an adapter, needs none.
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        for block in _blocks(len(head), len(hidden), ctx.largest):
            part = head[block]
            logits = product(hidden, part.t()) if kept is None else kept
            pull = _run(_gradient, hidden)(
                logits,
                targets - block.start,
                scale,
                log_total,
                entropies,
                of_logprobs,
                of_entropies,
                hidden.dtype,
            )
            del logits
            # Sums over blocks are float32: bfloat16 would lose small terms.
            grad_hidden += product(pull, part)
            if grad_head is not None:
                torch.mm(pull.t(), hidden, out=grad_head[block])
            del pull
        return grad_hidden.to(hidden.dtype), grad_head, None, None, None


def _blocks(num_columns: int, num_rows: int, largest: int) -> Iterator[slice]:
    """Equal blocks of columns; with all rows each has `largest` elements at most, or one tile."""
    count = -(-num_columns // max(largest // max(num_rows, 1), _TILE))
    width = -(-num_columns // (count * _TILE)) * _TILE
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return Compilation().of(function)


def _run(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    return _compiled(function) if like.is_cuda else function


def _add_block(
    logits: Tensor, targets: Tensor, scale: Tensor, m: Tensor, s: Tensor, t: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a block of unscaled logits [R, C] to the sums of each row; targets: from its start."""
    z = logits / scale
    highest = torch.maximum(m, z.amax(dim=1))
    earlier = (m - highest).exp()
    weights = (z - highest[:, None]).exp()
    is_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    return (
        highest,
        s * earlier + weights.sum(dim=1),
        t * earlier + (weights * z).sum(dim=1),
        torch.maximum(y, torch.where(is_target, z, -torch.inf).amax(dim=1)),
    )


def _gradient(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    log_total: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a block of unscaled logits: [R, C] in dtype."""
    distribution = logits / scale - log_total[:, None]
    pull = of_entropies[:, None] * (distribution + entropies[:, None]) + of_logprobs[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    own = torch.where(is_target, of_logprobs[:, None], 0.0)
    return ((own - distribution.exp() * pull) / scale).to(dtype)
