"""Log-probs, entropies and KL of tokens, without the [R, V] logits of a whole batch.

The learner's logits exist in this file and, on a GPU, in fused_logprobs.py, nowhere else.  Row i of
`hidden` predicts `targets[i]`; the shift by one position is applied by the caller.  The KL to the
reference has three uses: in the reward, in the loss, and for metrics.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from async_rl.algorithms.logits import Edits, product

Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def token_logprobs(
    hidden: Tensor,
    *,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    edits: Edits | None = None,
    reference: tuple[Tensor, Tensor] | None = None,
) -> Outputs:
    """Compute the log-prob of each target, the entropy of its distribution, its exact KL to that of
    a reference, and the log-prob of the reference.

    hidden: float32 or bfloat16 [R, H]; head: the same dtype [V, H]; targets: int64 [R]; reference:
    its hidden [R, H'] and head [V, H'], or None
    -> logprobs, entropies, kl float32 [R], each differentiable once, and ref_logprobs float32 [R],
    without gradient; both are None without a reference.
      log p = log softmax(hidden head^T / temperature),  entropy = -sum over v of p_v log p_v
    (the definition of Shannon, 1948),  KL = sum over v of p_v (log p_v - log q_v) with q of the
    reference (that of Kullback and Leibler, 1951), all of the logits after the edits.  Logits exist
    for at most chunk_tokens rows at a time, in forward and backward.  If all rows fit into one
    chunk, the backward pass uses them again.
    Raises RuntimeError (by torch) for a target outside the vocabulary; on a GPU its log-prob is
    -inf.
    """
    # The fused form has all rows and a part of the vocabulary at a time, edits are by rows.
    is_fused = hidden.is_cuda and edits is None
    hidden, head = _factors(hidden, head)
    reference = reference and _factors(*reference)
    kl = ref_logprobs = None
    if reference is not None or not is_fused:
        logprobs, entropies, kl, ref_logprobs = logprobs_by_rows(
            hidden, head, targets, temperature, chunk_tokens, edits, *(reference or (None, None))
        )
    if is_fused:
        from async_rl.algorithms.fused_logprobs import fused_logprobs

        largest = chunk_tokens * len(head)
        logprobs, entropies = fused_logprobs(hidden, head, targets, temperature, largest)
    return logprobs, entropies, kl, ref_logprobs


def chosen_logprobs(
    hidden: Tensor, *, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> Tensor:
    """Compute the log-probs of K tokens at each row, as `token_logprobs` of one.

    hidden: float32 or bfloat16 [R, H]; head: the same dtype [V, H]; targets: int64 [R, K]
    -> float32 [R, K], differentiable once.  Logits exist for chunk_tokens rows at a time, and are
    computed again in the backward pass.
    """
    hidden, head = _factors(hidden, head)
    recomputed = functools.partial(checkpoint, _chunk_chosen, use_reentrant=False)
    divided = (torch.split(x, chunk_tokens) for x in (hidden, targets))
    chunks = zip(*divided, strict=True)
    return torch.cat([recomputed(*chunk, head, temperature) for chunk in chunks])


def _chunk_chosen(hidden: Tensor, targets: Tensor, head: Tensor, temperature: float) -> Tensor:
    """The log-probs of a few rows: float32 [C, K]."""
    logits: Tensor = _Logits.apply(hidden, head)  # type: ignore[no-untyped-call]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, targets)


def _factors(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of logits in a dtype that `product` takes on their device."""
    if hidden.device.type == "cpu":
        return hidden.float(), head.float()
    return hidden, head


class _Logits(torch.autograd.Function):
    """`product` with a gradient, which torch does not have for bfloat16."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, head)
        return product(hidden, head.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, head = ctx.saved_tensors
        low = grad.to(hidden.dtype)
        return low @ head, low.t() @ hidden if ctx.needs_input_grad[1] else None


class _Chunk:
    """Two [C, V] matrices that every chunk uses again.

    A new pair for each chunk would fragment the allocator's memory, which costs as much again.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        num_rows: int,
        temperature: float,
        edits: Edits | None,
    ) -> None:
        shape = (min(num_rows, len(hidden)), len(head))
        self.logprobs = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        self.scratch = torch.empty_like(self.logprobs)
        self._head = head
        self._temperature = temperature
        self._edits = edits

    def fill(self, hidden: Tensor, rows: slice) -> Tensor:
        """Write the log-probs of these rows into `logprobs` and return the rows written."""
        hidden = hidden[rows]
        scratch = self.scratch[: len(hidden)]
        product(hidden, self._head.t(), out=scratch)
        scratch /= self._temperature
        if self._edits is not None:
            self._edits.apply(scratch, rows)
        return torch.log_softmax(scratch, dim=-1, out=self.logprobs[: len(hidden)])


class _TokenLogprobs(torch.autograd.Function):
    """With z the scaled logits, p their softmax, y the target and H the entropy:
    d logp_y / dz = 1_y - p,  dH / dz = -p (log p + H)  and  dKL / dz = p (log p - log q - KL).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        edits: Edits | None,
        ref_hidden: Tensor | None,
        ref_head: Tensor | None,
    ) -> Outputs:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        kl = ref_logprobs = None
        chunk = _Chunk(hidden, head, chunk_tokens, temperature, edits)
        if ref_hidden is not None and ref_head is not None:
            kl = torch.empty_like(logprobs)
            ref_logprobs = torch.empty_like(logprobs)
            referred = _Chunk(ref_hidden, ref_head, chunk_tokens, temperature, edits)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            distribution = chunk.fill(hidden, rows)
            logprobs[rows] = distribution.gather(1, targets[rows, None]).squeeze(1)
            probs = torch.exp(distribution, out=chunk.scratch[: len(distribution)])
            entropies[rows] = torch.linalg.vecdot(probs, distribution).neg_()
            if ref_hidden is not None and kl is not None and ref_logprobs is not None:
                # While the policy's probabilities are in memory: this costs no further product.
                ref = referred.fill(ref_hidden, rows)
                ref_logprobs[rows] = ref.gather(1, targets[rows, None]).squeeze(1)
                kl[rows] = torch.linalg.vecdot(probs, torch.sub(distribution, ref, out=ref))
        # One chunk: its log-probs are in memory anyway, and backward would compute them again.
        kept = chunk.logprobs if len(hidden) <= chunk_tokens else None
        if hidden.is_cuda and ref_hidden is not None:
            # The fused form has a chunk of its own, and the plan of memory has one of them.
            kept = None
        # Without this, an entropy that no loss uses would arrive in backward as a tensor of zeros
        # and cost a pass over [C, V].
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, head, targets, entropies, kl, kept, ref_hidden, ref_head)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.edits = edits
        if ref_logprobs is not None:
            ctx.mark_non_differentiable(ref_logprobs)
        return logprobs, entropies, kl, ref_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies, grad_kl, _ = grads
        hidden, head, targets, entropies, kl, kept, ref_hidden, ref_head = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are float32: bfloat16 would lose the small terms of a long batch.
        # A frozen head, as next to an adapter, needs none.
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        limits = ctx.chunk_tokens, ctx.temperature, ctx.edits
        chunk = _Chunk(hidden, head, *limits)
        referred = None if grad_kl is None else _Chunk(ref_hidden, ref_head, *limits)
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            distribution = chunk.fill(hidden, rows) if kept is None else kept
            size = len(distribution)
            share = grad_logprobs[rows, None]
            grad_logits = torch.exp(distribution, out=chunk.scratch[:size])
            if grad_kl is not None and referred is not None:
                ref = referred.fill(ref_hidden, rows)
                of_kl = torch.sub(distribution, ref, out=ref).sub_(kl[rows, None])
                of_kl.mul_(grad_kl[rows, None]).mul_(grad_logits)
            if grad_entropies is None:
                grad_logits.mul_(-share)
            else:
                pull = torch.add(distribution, entropies[rows, None], out=chunk.logprobs[:size])
                pull.mul_(grad_entropies[rows, None])
                grad_logits.mul_(pull.add_(share).neg_())
            if referred is not None:
                grad_logits.add_(of_kl)
            grad_logits.scatter_add_(1, targets[rows, None], share)
            grad_logits /= ctx.temperature
            low = grad_logits.to(hidden.dtype)
            torch.mm(low, head, out=grad_hidden[rows])
            if grad_head is None:
                continue
            if hidden.dtype is torch.float32:
                grad_head.addmm_(low.t(), hidden[rows])
            else:
                grad_head += low.t() @ hidden[rows]
        whole = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, whole, *[None] * 6


logprobs_by_rows: Callable[..., Outputs] = _TokenLogprobs.apply

KLEstimator = Literal["k1", "abs", "k2", "k3"]
_FARTHEST = -3.0
"""Nats below which k3 continues as a line. In a step of 4,200 tokens with an exact KL of 0.06, one
token at -7 made 69 % of the estimate, and its gradient that of the batch.
"""


def kl_estimate(policy_logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy, reference) at each token sampled from the policy.

    policy_logprobs, ref_logprobs: float32 [...] -> float32 [...].  With d = policy - ref
    (http://joschu.net/blog/kl-approx.html):
      k1   d                unbiased, may be negative; as a loss its expected gradient is 0, so it
                            belongs in the reward
      abs  |d|
      k2   d^2 / 2          its gradient is the gradient of the KL
      k3   exp(-d) - 1 + d  never negative; below d = -3 its tangent there, so that one token weighs
                            at most 16 - 19 (d + 3); unbiased except for that, and low where p << q
    """
    d = policy_logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return 0.5 * d.square()
        case "k3":
            near = d.clamp(min=_FARTHEST)
            return (-near).expm1() + near - (d - near) * (-near).expm1()
