"""GAC: the part of a gradient that repeats earlier steps is cut off (arXiv 2603.01501).

Start it with `async-rl launch conf=grpo_code algorithm=gac`.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from async_rl.learner.sharding import full_tensor

# The cosine of gradient and first moment above which the gradient is cut to that cosine. The
# thresholds of the paper were not published when this was written.
BOUND = 0.05


def cut(pieces: Callable[[], Iterator[tuple[list[Tensor], list[Tensor]]]]) -> None:
    """Change the gradients in place; `async_rl/plugins.py` has the argument."""
    squared = product = squared_before = 0.0
    for gradients, before in pieces():
        squared += _inner_product(gradients, gradients)
        product += _inner_product(gradients, before)
        squared_before += _inner_product(before, before)
    part = repeated_part(squared, product, squared_before, bound=BOUND)
    if part:
        for gradients, before in pieces():
            torch._foreach_sub_(gradients, before, alpha=part)


def repeated_part(squared: float, product: float, squared_before: float, *, bound: float) -> float:
    """Return how much of an earlier direction a gradient must lose to have the cosine `bound` with
    it; 0 if its cosine is not above that.

    squared: g.g; product: g.m; squared_before: m.m, of a gradient g and the earlier direction m.
    The gradient is then g - part m.
    """
    norm = (squared * squared_before) ** 0.5
    cosine = min(1.0, product / norm) if norm > 0 else 0.0
    if cosine <= bound:
        return 0.0
    orthogonal = (squared * (1 - cosine * cosine)) ** 0.5
    left = orthogonal / (1 - bound * bound) ** 0.5
    return float((cosine * squared**0.5 - bound * left) / squared_before**0.5)


def _inner_product(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Return the sum of the products of all elements of two lists of shards (collective)."""
    pairs = zip(left, right, strict=True)
    products = [(a.double() * b.double()).sum() for a, b in pairs]
    total = torch.stack(products).sum()
    return float(full_tensor(total))
