"""Logits."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a b in float32: rounded to bfloat16, logits would move log-probs by 0.01 nats.

    a: float32 or bfloat16 [R, H]; b: the same dtype [H, V] -> float32 [R, V].  Raises RuntimeError
    (by torch) for bfloat16 on a CPU.
    """
    if a.dtype is torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)
