"""The data of a request: checks of its datums, packed rows, and their losses and gradients.

Invariants
- Position i of a datum's tokens predicts its target i: nothing is shifted here.
- A datum that cannot be used is refused with its index, the field and the first bad position.
- Rows depend on the data and the budget only, so a repeated request has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.batching.packing import Pass
from async_rl.core.errors import DataError, NonFiniteError
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray
from async_rl.learner.models import Policy
from async_rl.service.losses import HIGH, LOW, Loss
from async_rl.service.proto import Datum

TARGETS = "target_tokens"
AnyArray = npt.NDArray[Any]


@frozen
class Limits:
    """vocab_size: ids are below it; most_tokens: of one datum; budget_tokens: of one row."""

    vocab_size: int
    most_tokens: int
    budget_tokens: int


@frozen
class Example:
    """A checked datum: tokens int64 [N]; targets int64 and inputs float32, [N] or [N, K]."""

    index: int
    tokens: AnyArray
    targets: AnyArray
    inputs: Mapping[str, AnyArray]


def check_data(
    data: Sequence[Datum], loss: Loss, config: Mapping[str, float], limits: Limits
) -> list[Example]:
    """Return the datums as examples with every input of the loss. Raises DataError for the first
    datum that cannot be used.
    """
    if not data:
        raise DataError("the request has no datum")
    return [_checked(i, datum, loss, config, limits) for i, datum in enumerate(data)]


def _checked(
    index: int, datum: Datum, loss: Loss, config: Mapping[str, float], limits: Limits
) -> Example:
    name = f"datum {index}"
    size = len(datum.tokens)
    if not 0 < size <= limits.most_tokens:
        raise DataError(f"{name} has {size} tokens; 1 to {limits.most_tokens} can be trained")
    needed = (TARGETS, *loss.inputs)
    if missing := [field for field in needed if field not in datum.inputs]:
        raise DataError(f"{name} has no {missing[0]}; its loss needs {', '.join(needed)}")
    if unknown := sorted(datum.inputs.keys() - {*needed, *config}):
        raise DataError(f"{name}: its loss has no input {unknown[0]}, but {', '.join(needed)}")
    targets = datum.inputs[TARGETS]
    shape = targets.shape
    if shape != (size,) and not (
        loss.has_alternatives and len(shape) == 2 and shape[0] == size and shape[1]
    ):
        raise DataError(f"{name}: {TARGETS} has the shape {shape}, its tokens ({size},)")
    if targets.dtype.kind != "i":
        raise DataError(f"{name}: {TARGETS} has the type {targets.dtype}; send int64")
    inputs: dict[str, AnyArray] = {}
    for field in (*loss.inputs, *config):
        values = datum.inputs.get(field)
        if values is None:
            values = np.full(shape, config[field])
        if values.shape != shape:
            raise DataError(f"{name}: {field} has the shape {values.shape}, {TARGETS} {shape}")
        inputs[field] = values.astype(np.float32)
        _refuse(~np.isfinite(values), f"{name}: {field}", values, "is not finite")
    for field, ids in (("tokens", datum.tokens), (TARGETS, targets)):
        outside = (ids < 0) | (ids >= limits.vocab_size)
        _refuse(outside, f"{name}: {field}", ids, f"is no token of 0..{limits.vocab_size - 1}")
    if LOW in inputs:
        low = inputs[LOW]
        _refuse((low < 0) | (low > inputs[HIGH]), f"{name}: {LOW}", low, f"is not in 0..{HIGH}")
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and not mask.any():
        raise DataError(f"{name}: sequence_ratio_mask marks no token")
    return Example(
        index=index,
        tokens=datum.tokens.astype(np.int64),
        targets=targets.astype(np.int64),
        inputs=inputs,
    )


def _refuse(is_bad: npt.NDArray[np.bool_], name: str, values: AnyArray, problem: str) -> None:
    if is_bad.any():
        first = np.argwhere(is_bad)[0]
        where = ", ".join(map(str, first))
        raise DataError(f"{name}[{where}]={values[tuple(first)]} {problem}")


@frozen
class Row:
    """Examples packed into one row of R tokens: targets int64 and inputs float32, [R] or [R, K]."""

    examples: Sequence[Example]
    packed: Pass
    targets: Tensor
    inputs: Mapping[str, Tensor]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each example."""
        return [len(example.tokens) for example in self.examples]


def pack_rows(examples: Sequence[Example], limits: Limits, device: torch.device) -> Iterator[Row]:
    """Pack the examples, those of an equal number of alternatives together, each into the first row
    with room for it.
    """
    rows: dict[tuple[int, ...], list[list[Example]]] = {}
    for example in examples:
        of_shape = rows.setdefault(example.targets.shape[1:], [])
        room = limits.budget_tokens - len(example.tokens)
        for row in of_shape:
            if sum(len(other.tokens) for other in row) <= room:
                row.append(example)
                break
        else:
            of_shape.append([example])
    for of_shape in rows.values():
        yield from (_row(row, device) for row in of_shape)


def _row(examples: Sequence[Example], device: torch.device) -> Row:
    def joined(arrays: Sequence[AnyArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    lengths = np.array([len(example.tokens) for example in examples])
    starts = np.cumsum(lengths) - lengths
    everything = torch.arange(lengths.sum(), device=device)
    targets = joined([example.targets for example in examples])
    nothing = everything[:0]
    segments = np.zeros((len(examples), 4), np.int64)
    segments[:, 0] = starts
    segments[:, 1] = lengths
    packed = Pass(
        input_ids=joined([example.tokens for example in examples])[None],
        position_ids=joined([np.arange(length) for length in lengths])[None],
        # Every position predicts the target of the same position.
        predict_index=everything,
        target_ids=targets,
        token_index=everything,
        last_index=nothing,
        sequences=nothing,
        segments=segments,
    )
    inputs = {field: joined([e.inputs[field] for e in examples]) for field in examples[0].inputs}
    return Row(examples=examples, packed=packed, targets=targets, inputs=inputs)


def run_row(policy: Policy, row: Row, loss: Loss, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the targets, float32 [R] or [R, K] without gradient, and the sum of
    their losses, float64 []. Raises NonFiniteError if it is not finite.
    """
    if row.targets.ndim == 1:
        logprobs = policy(row.packed, temperature=1.0, chunk_tokens=chunk_tokens).logprobs
    else:
        logprobs = policy.chosen_logprobs(row.packed, row.targets, chunk_tokens=chunk_tokens)
    by_token = loss.compute(logprobs, row.inputs, row.lengths)
    total = by_token.double().sum()
    if not math.isfinite(total.detach()):
        is_bad = ~by_token.detach().isfinite().cpu()
        parts = zip(row.examples, torch.split(is_bad, row.lengths), strict=True)
        where = [(e.index, int(bad.nonzero()[0, 0])) for e, bad in parts if bad.any()]
        index, position = where[0] if where else (row.examples[0].index, 0)
        raise NonFiniteError(
            f"datum {index}: the loss at position {position} is not finite; look at its log-probs"
            " and advantages. The request has no effect"
        )
    return logprobs.detach(), total


def by_example(row: Row, logprobs: Tensor) -> Iterator[tuple[int, FloatArray]]:
    """Yield the index of each example of a row, and its log-probs."""
    parts = torch.split(logprobs.cpu(), row.lengths)
    for example, part in zip(row.examples, parts, strict=True):
        yield example.index, part.numpy()
