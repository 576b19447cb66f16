"""Qwen3's attention and norms with fewer passes over memory, for float32 on a CPU.

There a pass over memory costs as much as a matrix product; a step of the embedded model takes a
fifth less time. `fuse(model)` replaces modules in place; parameters and their names stay.
Invariant: results equal the results of the replaced modules within float error, which
`loading.load_policy` checks on every start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from async_rl.learner.attention import Plan

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles, float32 [T, 1, D] each."""


def fuse(model: PreTrainedModel) -> None:
    """Replace every exact Qwen3Attention and Qwen3RMSNorm; other modules stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # In place, so that names and parameters of checkpoints stay the names of Hugging Face.
            # Exact types: a subclass may compute something else.
            if type(child) is Qwen3Attention:
                setattr(parent, name, FusedAttention(child))
            elif type(child) is Qwen3RMSNorm:
                setattr(parent, name, FusedRMSNorm(child))


class FusedRMSNorm(nn.Module):
    """RMSNorm, x / rms(x) * weight (arXiv 1910.07467 eq. 4)."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = plain.weight
        self.eps: float = plain.variance_epsilon

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Normalise the last dimension, then rotate it: float32 [..., H] -> float32 [..., H]."""
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps, rotation)  # type: ignore[no-untyped-call]
        return result


class FusedAttention(nn.Module):
    """Projections, normed and rotated queries and keys, attention by segments.

    The heads of a token stay adjacent in memory, so nothing is transposed.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.q_proj: nn.Linear = plain.q_proj
        self.k_proj: nn.Linear = plain.k_proj
        self.v_proj: nn.Linear = plain.v_proj
        self.o_proj: nn.Linear = plain.o_proj
        self.q_norm = FusedRMSNorm(plain.q_norm)
        self.k_norm = FusedRMSNorm(plain.k_norm)
        self.head_dim: int = plain.head_dim
        self.scaling: float = plain.scaling

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        segments: Plan,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend by segments: float32 [1, T, H] -> float32 [1, T, H]."""
        x = hidden_states[0]
        cos, sin = position_embeddings
        rotation = cos[0][:, None], sin[0][:, None]
        query, key, value = (
            projection(x).view(len(x), -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = self.q_norm(query, rotation)
        key = self.k_norm(key, rotation)
        attended = segments.attend(query, key, value, self.scaling, None)
        return self.o_proj(attended.flatten(1)[None]), None


def _norm_scale(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x): float32 [..., 1]."""
    # vecdot reads x once; `x.pow(2).mean()` would write and read a second tensor.
    mean_square: Tensor = torch.linalg.vecdot(x, x).mul_(1 / x.shape[-1])
    return mean_square.add_(eps).rsqrt_().unsqueeze(-1)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x * scale:
    d weight = sum(grad n),  d x = scale (grad weight - n mean(grad weight n)).
    """
    normed = x * scale
    pulled = grad * normed
    grad_weight = pulled.flatten(0, -2).sum(0)
    share = (pulled @ weight).mul_(-1 / x.shape[-1]).unsqueeze(-1)
    return normed.mul_(share).addcmul_(grad, weight).mul_(scale), grad_weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of the last dimension (RoPE, arXiv 2104.09864); sign=-1
    rotates back.
    """
    half = x.shape[-1] // 2
    # Halves of one new tensor: concatenating rotated halves would copy them again.
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return y


class _RMSNorm(torch.autograd.Function):
    """The norm and, in the same pass over memory, the rotation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, rotation: Rotation | None
    ) -> Tensor:
        scale = _norm_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.rotation = rotation
        normed = (x * scale).mul_(weight)
        return normed if rotation is None else _rotate(normed, *rotation, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if ctx.rotation is not None:
            # The inverse of a rotation is its transpose, so the gradient is rotated back.
            grad = _rotate(grad, *ctx.rotation, sign=-1.0)
        return *_norm_backward(grad, *ctx.saved_tensors), None, None
