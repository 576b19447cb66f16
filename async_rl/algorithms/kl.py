"""KL(policy, reference): estimates from sampled tokens, the exact value, and its coefficient.

The learner uses them for the KL in the reward, the KL in the loss, and for metrics.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from async_rl.algorithms.logprobs import chunk_logprobs

KLEstimator = Literal["k1", "abs", "k2", "k3"]


def kl_estimate(policy_logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy, reference) at each token sampled from the policy.

    policy_logprobs, ref_logprobs: float32 [...] -> float32 [...].  With d = policy - ref
    (http://joschu.net/blog/kl-approx.html):
      k1   d                unbiased, may be negative; as a loss its expected gradient is 0, so it
                            belongs in the reward
      abs  |d|
      k2   d^2 / 2          its gradient is the gradient of the KL
      k3   exp(-d) - 1 + d  unbiased, never negative
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
            return (-d).expm1() + d


def full_kl(
    hidden: Tensor,
    *,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Compute the exact KL between next-token distributions.

    hidden, ref_hidden: float32 or bfloat16 [R, H]; head, ref_head: the same dtype [V, H]
    -> float32 [R], differentiable once with respect to hidden and head.
      KL = sum over v of p_v (log p_v - log q_v),  p = softmax(hidden head^T / temperature)
    and q the same of the reference (the definition of Kullback and Leibler, 1951).  Logits exist
    for chunk_tokens rows at a time.  Shapes that do not match raise RuntimeError in torch.
    """
    result: Tensor = _FullKL.apply(hidden, head, ref_hidden, ref_head, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return result


class _FullKL(torch.autograd.Function):
    """With z the scaled logits of the policy: dKL / dz = p (log p - log q - KL)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        ref_hidden: Tensor,
        ref_head: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        kl = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logp = chunk_logprobs(hidden[rows], head, temperature)
            logq = chunk_logprobs(ref_hidden[rows], ref_head, temperature)
            kl[rows] = torch.linalg.vecdot(logp.exp(), logp - logq)
        ctx.save_for_backward(hidden, head, ref_hidden, ref_head, kl)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, ref_hidden, ref_head, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are float32: bfloat16 would lose the small terms of a long batch.
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            # Log-probs are computed again, because all rows together would take [R, V].
            logp = chunk_logprobs(hidden[rows], head, ctx.temperature)
            logq = chunk_logprobs(ref_hidden[rows], ref_head, ctx.temperature)
            surplus = logp - logq - kl[rows, None]
            grad_logits = logp.exp_().mul_(surplus).mul_(grads[0][rows, None] / ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, head, out=grad_hidden[rows])
            grad_head += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None


def adapted_kl_coef(
    kl_coef: float, *, kl: float, target: float, horizon: float, num_sequences: int
) -> float:
    """Return the KL coefficient after a step of the adaptive controller.

    kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon)
    (arXiv 1909.08593 sec. 2.2).  kl: nats of KL(policy, reference) per sequence; above target the
    coefficient grows.  target=0 raises ZeroDivisionError; the configuration excludes it.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_sequences / horizon)
