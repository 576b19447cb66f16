"""The data of a request: datums that are checked, packed into rows, and their losses per token.

Formulas: tinker-docs.thinkingmachines.ai/tinker/losses. With p the log-prob of the target, q that
of the sampler, A the advantage, r = exp(p - q), and [low, high] the absolute bounds of a ratio. The
loss of a request is the sum over all tokens and datums, never a mean.

Invariants
- Position i of a datum's tokens predicts its target i: nothing is shifted here.
- A datum that cannot be used is refused with its index, the field and the first bad position.
- Rows depend on the data and the budget only, so a repeated request has the same bits.
"""

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.packing import Pass, RowInProgress
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.learner.models import Policy
from async_rl.service.proto import AnyArray, Datum

TARGETS = "target_tokens"
LEAST_SHARED = 8
"""Tokens: below it a segment of its own costs more than it saves."""
_MOST = float(np.finfo(np.float32).max)
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


@frozen
class Limits:
    """vocab_size: ids are below it; most_tokens: of one datum; budget_tokens: of one row."""

    vocab_size: int
    most_tokens: int
    budget_tokens: int


def check_data(
    data: Sequence[Datum], loss: Loss, config: Mapping[str, float], limits: Limits
) -> list[Example]:
    """Return the datums as examples with every input of the loss. Raises DataError for the first
    datum that cannot be used.
    """
    if not data:
        raise DataError("the request has no datum")
    examples = []
    for index, datum in enumerate(data):
        name = f"datum {index}"
        size = len(datum.tokens)
        if not 0 < size <= limits.most_tokens:
            raise DataError(f"{name} has {size} tokens; 1 to {limits.most_tokens} can be trained")
        needed = {TARGETS, *loss.inputs}
        if odd := needed ^ (datum.inputs.keys() - config.keys()):
            raise DataError(
                f"{name} lacks, or should not have, {min(odd)}; its loss needs"
                f" {', '.join(sorted(needed))}"
            )
        targets = datum.inputs[TARGETS]
        shape = targets.shape
        if shape[:1] != (size,) or len(shape) > loss.most_rank or 0 in shape:
            raise DataError(f"{name}: {TARGETS} has the shape {shape}, its tokens ({size},)")
        if targets.dtype.kind != "i":
            raise DataError(f"{name}: {TARGETS} has the type {targets.dtype}; send int64")
        for field, ids in (("tokens", datum.tokens), (TARGETS, targets)):
            _check_range(f"{name}: {field}", ids, 0, limits.vocab_size - 1)
        inputs: dict[str, AnyArray] = {}
        for field in (*loss.inputs, *config):
            values = datum.inputs.get(field)
            if values is None:
                values = np.full(shape, config[field])
            if values.shape != shape:
                raise DataError(f"{name}: {field} has the shape {values.shape}, {TARGETS} {shape}")
            # The lower threshold is before the upper one, which is not below it.
            least = {LOW: 0.0, HIGH: inputs.get(LOW)}.get(field, -_MOST)
            _check_range(f"{name}: {field}", values, least, _MOST)
            inputs[field] = values
        mask = inputs.get("sequence_ratio_mask")
        if mask is not None and not mask.any():
            raise DataError(f"{name}: sequence_ratio_mask marks no token")
        examples.append(
            Example(
                index=index,
                tokens=datum.tokens,
                targets=targets,
                inputs=inputs,
            )
        )
    return examples


def _check_range(name: str, values: AnyArray, low: Any, high: float) -> None:
    """Refuse a value that is not in low..high, as NaN never is."""
    outside = np.argwhere(~((values >= low) & (values <= high)))
    if len(outside):
        first = tuple(outside[0].tolist())
        least = np.broadcast_to(low, values.shape)[first]
        raise DataError(
            f"{name}[{', '.join(map(str, first))}]={values[first]} is not in {least}..{high}"
        )


def _shared(one: Example, then: Example) -> int:
    """Return the number of tokens at the start of both, 0 if storing them once saves nothing."""
    size = min(len(one.tokens), len(then.tokens))
    differs = one.tokens[:size] != then.tokens[:size]
    shared = int(differs.argmax()) if differs.any() else size
    return shared if shared >= LEAST_SHARED else 0


def _width(example: Example) -> tuple[int, ...]:
    return example.targets.shape[1:]


def pack_rows(examples: Sequence[Example], limits: Limits, device: torch.device) -> Iterator[Row]:
    """Pack the examples in their order, those of an equal number of alternatives together.

    A row stores once what neighbors begin with alike, as the samples of a prompt and the turns of a
    conversation do. A row that has no room for the next example is complete.
    """
    for _, alike in itertools.groupby(sorted(examples, key=_width), _width):
        row: list[Example] = []
        room = limits.budget_tokens
        for example in alike:
            shared = _shared(row[-1], example) if row else 0
            if row and len(example.tokens) - shared > room:
                yield _row(row, device)
                row = []
                room = limits.budget_tokens
                shared = 0
            row.append(example)
            room -= len(example.tokens) - shared
        yield _row(row, device)


def _row(examples: Sequence[Example], device: torch.device) -> Row:
    row = RowInProgress()
    positions: list[AnyArray] = []
    for index, example in enumerate(examples):
        shared = _shared(examples[index - 1], example) if index else 0
        start = row.size
        before = positions[-1][:shared] if shared else np.empty(0, np.int64)
        row.add(example.tokens[shared:], int(before[-1]) if shared else -1)
        positions.append(np.r_[before, start : row.size])
    targets = np.concatenate([example.targets for example in examples])
    pairs = np.column_stack([np.concatenate(positions), targets])
    # Shared tokens mostly have equal targets, whose logits are then computed once.
    unique, pair = np.unique(pairs, axis=0, return_inverse=True)
    row.predict.append(unique[:, 0])
    row.targets.append(unique[:, 1:].reshape(len(unique), *targets.shape[1:]))
    return Row(
        examples=examples,
        packed=row.finish([], device),
        pair=torch.as_tensor(pair.reshape(-1), device=device),
    )


def run_row(policy: Policy, row: Row, loss: Loss, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the targets, float32 [R] or [R, K] without gradient, and the sum of
    their losses, float64 []. Raises DataError if the sum is not finite.
    """
    targets = row.packed.target_ids
    if targets.ndim == 1:
        of_pairs = policy(row.packed, temperature=1.0, chunk_tokens=chunk_tokens).logprobs
    else:
        of_pairs = policy.chosen_logprobs(row.packed, targets, chunk_tokens=chunk_tokens)
    logprobs = of_pairs.index_select(0, row.pair)
    by_token = loss.compute(logprobs, row)
    # Its gradient is float32.
    for index, is_bad in by_example(row, ~by_token.float().isfinite()):
        if is_bad.any():
            raise DataError(
                f"datum {index}: the loss at position {np.argwhere(is_bad)[0, 0]} is not finite;"
                " look at its log-probs and advantages. The request has no effect"
            )
    return logprobs.detach(), by_token.sum()


def by_example(row: Row, values: Tensor) -> Iterator[tuple[int, AnyArray]]:
    """Yield the index of each example of a row, and its values, as log-probs."""
    parts = torch.split(values.cpu(), row.lengths)
    for example, part in zip(row.examples, parts, strict=True):
        yield example.index, part.numpy()
