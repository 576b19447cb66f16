"""The losses of the Tinker API, per token; the loss of a request is their sum over all tokens and
datums, never a mean.

Formulas: tinker-docs.thinkingmachines.ai/tinker/losses. With p the log-prob of the target, q that
of the sampler, A the advantage, r = exp(p - q), and [low, high] the absolute bounds of a ratio.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen

Inputs = Mapping[str, Tensor]
LOW = "clip_low_threshold"
HIGH = "clip_high_threshold"


@frozen
class Loss:
    """One loss.

    inputs: what a datum must have besides target_tokens; defaults: the configuration, where NaN
    has to be replaced; compute: (log-probs [R], inputs [R], lengths of the datums in them)
    -> loss [R]. A threshold of the configuration may also be an input: then each token has its own.
    has_alternatives: the targets may have K columns, and so everything else [R, K].
    """

    inputs: Sequence[str]
    compute: Callable[[Tensor, Inputs, Sequence[int]], Tensor]
    defaults: Mapping[str, float]
    has_alternatives: bool = False


def _cross_entropy(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    return -p * inputs["weights"]


def _importance_sampling(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    return -(p - inputs["logprobs"]).exp() * inputs["advantages"]


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    advantages = inputs["advantages"]
    bounded = ratio.clamp(inputs[LOW], inputs[HIGH])
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _ppo(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    return _clipped((p - inputs["logprobs"]).exp(), inputs)


def _cispo(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    ratio = (p.detach() - inputs["logprobs"]).exp()
    return -ratio.clamp(inputs[LOW], inputs[HIGH]) * p * inputs["advantages"]


def _dro(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    penalty = inputs["beta"] / 2 * (p - inputs["logprobs"]).square()
    return penalty - p * inputs["advantages"]


def _gspo(p: Tensor, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    """Each token has the value of its sequence's ratio, and its own gradient (GSPO-token)."""
    detached = p.detach()
    gaps = torch.split(detached - inputs["logprobs"], list(lengths))
    masks = torch.split(inputs["sequence_ratio_mask"], list(lengths))
    # A datum without a marked token is refused before.
    means = torch.cat(
        [gap[mask != 0].mean().expand(len(gap)) for gap, mask in zip(gaps, masks, strict=True)]
    )
    return _clipped((means + p - detached).exp(), inputs)


_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        inputs=("weights",), compute=_cross_entropy, defaults={}, has_alternatives=True
    ),
    "importance_sampling": Loss(inputs=_SAMPLED, compute=_importance_sampling, defaults={}),
    "ppo": Loss(inputs=_SAMPLED, compute=_ppo, defaults={LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(inputs=_SAMPLED, compute=_cispo, defaults={LOW: 0.0, HIGH: 4.0}),
    # The API has no published default of beta.
    "dro": Loss(inputs=_SAMPLED, compute=_dro, defaults={"beta": math.nan}),
    # The API's own defaults are not published; these are those of arXiv 2507.18071 sec. 5.1.
    "gspo": Loss(
        inputs=(*_SAMPLED, "sequence_ratio_mask"),
        compute=_gspo,
        defaults={LOW: 1 - 3e-4, HIGH: 1 + 4e-4},
    ),
}


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
