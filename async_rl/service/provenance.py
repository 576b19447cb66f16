"""The origin of trained tokens: what a client says about them is compared with what was sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from async_rl.core.errors import DataError
from async_rl.core.types import IntArray
from async_rl.service.proto import AnyArray, Datum, ForwardBackwardOutput, Spans
from async_rl.service.sampling import Drawn

Find = Callable[[str], Drawn]


def check(data: Sequence[Datum], find: Find) -> list[Drawn]:
    """Return the sampled parts of the targets. Raises DataError at the first token that is not the
    token of the sequence that its span names, or whose log-prob is not the sampled one. The learner
    checks the rest.
    """
    drawn: list[Drawn] = []
    for index, datum in enumerate(data):
        targets = datum.inputs.get("target_tokens", datum.tokens)
        _compare(f"datum {index}: model_input", datum.tokens, datum.input_spans, find, None)
        logprobs = datum.inputs.get("logprobs")
        name = f"datum {index}: target_tokens"
        drawn += _compare(name, targets, datum.target_spans, find, logprobs)
    return drawn


def _compare(
    name: str, tokens: AnyArray, spans: Spans, find: Find, logprobs: AnyArray | None
) -> list[Drawn]:
    parts: list[Drawn] = []
    covered = sum(span.length for span, _ in spans)
    if spans and (tokens.ndim != 1 or covered != len(tokens)):
        raise DataError(f"{name} has the shape {tokens.shape}, and spans of {covered} tokens")
    start = 0
    for span, is_sampled in spans:
        drawn = find(span.sequence_id)
        source: AnyArray = drawn.tokens if is_sampled else drawn.prompt
        end = span.offset + span.length
        if min(span.offset, span.length) < 0 or end > len(source):
            raise DataError(
                f"{name}: {span.sequence_id} has {len(source)} tokens, not {span.length} from"
                f" {span.offset}"
            )
        pairs = [(name, tokens, source)]
        if is_sampled:
            versions = drawn.versions[span.offset : end]
            parts.append(dataclasses.replace(drawn, versions=versions))
            if logprobs is not None and logprobs.shape == tokens.shape:
                pairs.append((f"{name}: logprobs", logprobs, drawn.logprobs))
        for label, claimed, true in pairs:
            wrong = np.flatnonzero(claimed[start : start + span.length] != true[span.offset : end])
            if len(wrong):
                here, there = start + wrong[0], span.offset + wrong[0]
                raise DataError(
                    f"{label}[{here}] is {claimed[here]}, and {true[there]} at {there} of"
                    f" {span.sequence_id}"
                )
        start += span.length
    return parts


def with_ages(answer: bytes, versions: Sequence[IntArray], version: int) -> bytes:
    """Add to the answer of forward_backward how many versions older than the run's weights its
    sampled tokens are. versions: int32 arrays of them.
    """
    if not any(map(len, versions)):
        return answer
    ages = version - np.concatenate(versions)
    output = ForwardBackwardOutput.FromString(answer)
    output.metrics["age_mean:mean"] = float(ages.mean())
    output.metrics["age_max:max"] = float(ages.max())
    return bytes(output.SerializeToString())
