"""Log-probs, entropies and KL of tokens, without the [R, V] logits of a whole batch.

The learner's logits exist in this file and, on a GPU, in fused_logprobs.py, nowhere else.  Row i of
`hidden` predicts `targets[i]`; the shift by one position is applied by the caller.  The KL to the
reference has three uses: in the reward, in the loss, and for metrics.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from async_rl.algorithms.edits import Edits


def token_logprobs(
    hidden: Tensor,
    *,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    edits: Edits | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target and the entropy of its distribution.

    hidden: float32 or bfloat16 [R, H]; head: the same dtype [V, H]; targets: int64 [R]
    -> logprobs float32 [R], entropies float32 [R], both differentiable once.
      log p = log softmax(hidden head^T / temperature),  entropy = -sum over v of p_v log p_v
    (the definition of Shannon, 1948), of the logits after the edits.  Logits exist for at most
    chunk_tokens rows at a time, in forward and backward.  If all rows fit into one chunk, the
    backward pass uses them again.
    Raises RuntimeError (by torch) for a target outside the vocabulary; on a GPU its log-prob is
    -inf.
    """
    # The fused form has all rows and a part of the vocabulary at a time, edits are by rows.
    if hidden.is_cuda and edits is None:
        from async_rl.algorithms.fused_logprobs import fused_logprobs

        return fused_logprobs(hidden, head, targets, temperature, chunk_tokens * len(head))
    return logprobs_by_rows(hidden, head, targets, temperature, chunk_tokens, edits)


def logprobs_by_rows(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    edits: Edits | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` with logits of at most chunk_tokens rows."""

    def of_chunk(rows: slice, hidden: Tensor, targets: Tensor, head: Tensor) -> Sequence[Tensor]:
        logprobs = _log_softmax(hidden, head, temperature, edits, rows)
        entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        return logprobs.gather(1, targets[:, None]).squeeze(1), entropies

    logprobs, entropies = _by_chunks(of_chunk, hidden, targets, head, chunk_tokens)
    return logprobs, entropies


def chosen_logprobs(
    hidden: Tensor, *, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> Tensor:
    """Compute the log-probs of K tokens at each row, as `token_logprobs` of one.

    hidden: float32 or bfloat16 [R, H]; head: the same dtype [V, H]; targets: int64 [R, K]
    -> float32 [R, K], differentiable once.  Logits exist for chunk_tokens rows at a time.
    """

    def of_chunk(rows: slice, hidden: Tensor, targets: Tensor, head: Tensor) -> Sequence[Tensor]:
        return [_log_softmax(hidden, head, temperature, None, rows).gather(1, targets)]

    (logprobs,) = _by_chunks(of_chunk, hidden, targets, head, chunk_tokens)
    return logprobs


def _by_chunks(
    of_chunk: Callable[[slice, Tensor, Tensor, Tensor], Sequence[Tensor]],
    hidden: Tensor,
    other: Tensor,
    head: Tensor,
    chunk_tokens: int,
) -> list[Tensor]:
    """Compute tensors of R rows from chunk_tokens rows of hidden and other at a time.

    The logits of several chunks are computed again in the backward pass, because all rows together
    would take [R, V].
    """
    # One copy of the head for all chunks: their gradients add up in float32, because bfloat16 would
    # lose the small terms of a long batch.
    summed = head.float() if head.requires_grad else head
    if len(hidden) > chunk_tokens:
        of_chunk = functools.partial(checkpoint, of_chunk, use_reentrant=False)
    # At least one chunk: a rank without tokens returns empty tensors.
    starts = range(0, max(1, len(hidden)), chunk_tokens)
    chunks = [slice(start, start + chunk_tokens) for start in starts]
    parts = [of_chunk(rows, hidden[rows], other[rows], summed) for rows in chunks]
    return [torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]


def _log_softmax(
    hidden: Tensor, head: Tensor, temperature: float, edits: Edits | None, rows: slice
) -> Tensor:
    """The log-probs of the vocabulary at a few rows, after the edits: float32 [C, V]."""
    logits = (hidden @ head.to(hidden.dtype).t()).float().div_(temperature)
    if edits is not None:
        edits.apply(logits, rows)
    return torch.log_softmax(logits, dim=-1)


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
                            at most 16 - 19 (d + 3); unbiased but for that, and low where p << q
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


def full_kl(
    hidden: Tensor,
    *,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    temperature: float,
    chunk_tokens: int,
    edits: Edits | None = None,
) -> Tensor:
    """Compute the exact KL between next-token distributions.

    hidden, ref_hidden: float32 or bfloat16 [R, H]; head, ref_head: the same dtype [V, H]
    -> float32 [R], differentiable once with respect to hidden and head.
      KL = sum over v of p_v (log p_v - log q_v),  p = softmax(hidden head^T / temperature)
    and q the same of the reference (the definition of Kullback and Leibler, 1951), both of the
    logits after the edits.  Logits exist for chunk_tokens rows at a time.  Shapes that do not match
    raise RuntimeError or ValueError.
    """

    def of_chunk(rows: slice, hidden: Tensor, ref_hidden: Tensor, head: Tensor) -> Sequence[Tensor]:
        logprobs = _log_softmax(hidden, head, temperature, edits, rows)
        difference = logprobs - _log_softmax(ref_hidden, ref_head, temperature, edits, rows)
        return [torch.linalg.vecdot(logprobs.exp(), difference)]

    (kl,) = _by_chunks(of_chunk, hidden, ref_hidden, head, chunk_tokens)
    return kl


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
