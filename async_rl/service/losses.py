"""Rows of checked datums, and the losses of the Tinker API, per token. The loss of a request is
their sum over all tokens and datums, never a mean.

Formulas: tinker-docs.thinkingmachines.ai/tinker/losses. With p the log-prob of the target, q that
of the sampler, A the advantage, r = exp(p - q), and [low, high] the absolute bounds of a ratio.
Pure.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.packing import Pass
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.service.proto import AnyArray

LOW = "clip_low_threshold"
HIGH = "clip_high_threshold"


@frozen
class Example:
    """A checked datum: tokens [N]; targets and inputs, numbers, [N] or [N, K]."""

    index: int
    tokens: AnyArray
    targets: AnyArray
    inputs: Mapping[str, AnyArray]


@frozen
class Row:
    """Examples packed into one row, with R positions.

    packed: predicts the U different pairs of a position and its targets, int64 [U] or [U, K], which
    are its target_ids; pair: int64 [R], that of each position.
    """

    examples: Sequence[Example]
    packed: Pass
    pair: Tensor

    @property
    def lengths(self) -> list[int]:
        """The tokens of each example."""
        return [len(example.tokens) for example in self.examples]

    def input(self, field: str) -> Tensor:
        """Return an input of all examples: [R] or [R, K]."""
        values = np.concatenate([example.inputs[field] for example in self.examples])
        return torch.as_tensor(values, device=self.pair.device)


@frozen
class Loss:
    """One loss.

    As in losses.toml. A threshold of the configuration may also be an input: then each token has
    its own.
    """

    name: str
    inputs: Sequence[str]
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    most_rank: int = 1

    def compute(self, p: Tensor, row: Row) -> Tensor:
        """Return the loss of each token, float64 in the shape of p.

        p: log-probs [R], and of cross_entropy also [R, K].
        """
        # In float32 the mean of a long sequence's gaps, of which GSPO clips the fourth digit, is
        # wrong by 2e-6 of the loss.
        p = p.double()
        # Its targets may have K columns.
        if self.name == "cross_entropy":
            return -p * row.input("weights")
        advantages = row.input("advantages")
        gap = p - row.input("logprobs")
        if self.name == "dro":
            return row.input("beta") / 2 * gap.square() - p * advantages
        if self.name == "importance_sampling":
            return -gap.exp() * advantages
        low = row.input(LOW)
        high = row.input(HIGH)
        if self.name == "cispo":
            return -gap.detach().exp().clamp(low, high) * p * advantages
        if self.name == "gspo":
            means = _of_sequences(gap.detach(), row.input("sequence_ratio_mask"), row.lengths)
            # Each token has the value of its sequence's ratio, and its own gradient (GSPO-token).
            gap = means + p - p.detach()
        ratio = gap.exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _of_sequences(gaps: Tensor, masks: Tensor, lengths: Sequence[int]) -> Tensor:
    """For each token the mean of the marked tokens of its datum."""
    sizes = list(lengths)
    parts = zip(torch.split(gaps, sizes), torch.split(masks, sizes), strict=True)
    # A datum without a marked token is refused before.
    return torch.cat([gap[mask != 0].mean().expand(len(gap)) for gap, mask in parts])


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LOSSES: Mapping[str, Loss] = {name: Loss(name=name, **spec) for name, spec in _FILE.items()}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return a loss and its configuration with defaults. Raises DataError for an unknown name or
    key, and for a value that is none.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise DataError(
            f"loss_fn={name} is not computed here; use one of {', '.join(LOSSES)}, or"
            " forward_backward_custom"
        )
    values: dict[str, float] = {}
    for key, value in {**loss.defaults, **config}.items():
        if key not in loss.defaults:
            known = ", ".join(loss.defaults) or "none"
            raise DataError(f"loss_fn_config of {name} has no key {key}; its keys: {known}")
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise DataError(
                f"loss_fn={name} needs a finite number from 0 as its {key}, not {value}:"
                f" loss_fn_config={{{key!r}: a number}}"
            )
        values[key] = value
    return loss, values
