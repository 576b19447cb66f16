"""The data of a request: checks of its datums, packed rows, and their losses and gradients.

Invariants
- Position i of a datum's tokens predicts its target i: nothing is shifted here.
- A datum that cannot be used is refused with its index, the field and the first bad position.
- Rows depend on the data and the budget only, so a repeated request has the same bits.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.packing import RowInProgress
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.learner.models import Policy
from async_rl.service.losses import HIGH, LOW, Example, Loss, Row
from async_rl.service.proto import AnyArray, Datum

TARGETS = "target_tokens"
LEAST_SHARED = 8
"""Tokens: below it a segment of its own costs more than it saves."""
_MOST = float(np.finfo(np.float32).max)


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
    """Return the number of tokens that both begin with, 0 if storing them once saves nothing."""
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
