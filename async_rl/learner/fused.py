"""Qwen3's attention and norms with fewer passes over memory, for float32 on a CPU, where such
passes cost as much as the products.

`fuse(model)` replaces modules in place; parameters and their names stay.  It takes a fifth off a
step of the embedded model. Invariant: results equal those of the replaced modules within float
error; `models.load_policy` checks it on every start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from async_rl.batching.packing import Layout
from async_rl.learner.attention import attend


def fuse(model: PreTrainedModel) -> None:
    """Replaces every exact Qwen3Attention and Qwen3RMSNorm; other models stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Qwen3Attention:
                setattr(parent, name, FusedAttention(child))
            elif type(child) is Qwen3RMSNorm:
                setattr(parent, name, FusedRMSNorm(child))


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = plain.weight
        self.eps: float = plain.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class FusedAttention(nn.Module):
    """Projections, normed and rotated queries and keys, attention by segments; heads stay beside
    each other, so nothing is transposed.
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
        segments: Layout,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, T, H] -> [1, T, H]."""
        x = hidden_states[0]
        cos, sin = position_embeddings[0][0][:, None], position_embeddings[1][0][:, None]

        def normed(projected: Tensor, norm: FusedRMSNorm) -> Tensor:
            heads = projected.view(len(x), -1, self.head_dim)
            result: Tensor = _RotatedRMSNorm.apply(heads, norm.weight, norm.eps, cos, sin)  # type: ignore[no-untyped-call]
            return result

        query, key = normed(self.q_proj(x), self.q_norm), normed(self.k_proj(x), self.k_norm)
        value = self.v_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(attend(segments, query, key, value, self.scaling).flatten(1)[None]), None


def _norm_scale(x: Tensor, eps: float) -> Tensor:
    scale: Tensor = torch.linalg.vecdot(x, x).mul_(1 / x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    return scale


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x * scale:  d weight = sum(grad n),  d x = scale (grad weight - n mean(grad weight
    n)).
    """
    normed = x * scale
    pulled = grad * normed
    grad_weight = pulled.flatten(0, -2).sum(0)
    share = (pulled @ weight).mul_(-1 / x.shape[-1]).unsqueeze(-1)
    return normed.mul_(share).addcmul_(grad, weight).mul_(scale), grad_weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Rotates the pairs (i, i + D / 2) of the last dimension; sign -1 rotates back."""
    half = x.shape[-1] // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _norm_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_backward(grads[0], *ctx.saved_tensors), None


class _RotatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        scale = _norm_scale(x, eps)
        ctx.save_for_backward(x, weight, scale, cos, sin)
        return _rotate((x * scale).mul_(weight), cos, sin, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, cos, sin = ctx.saved_tensors
        return (
            *_norm_backward(_rotate(grads[0], cos, sin, sign=-1.0), x, weight, scale),
            None,
            None,
            None,
        )
