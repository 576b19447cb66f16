"""Samples: requests of clients for the generators, sequences for the clients, and the origin of
trained tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, IntArray
from async_rl.protocol.service import Sample, Sampled
from async_rl.service import forms
from async_rl.service.address import folder_of
from async_rl.service.proto import (
    AnyArray,
    Datum,
    Drawn,
    ForwardBackwardOutput,
    SampleResponse,
    Spans,
    drawn_of,
)
from async_rl.service.store import Request, Sampler, Store

_NO_ALTERNATIVE = -99999.0


@frozen
class Model:
    """The base model. tokenizer: directory or name on the hub; most_rank: of an adapter; 0 =
    all weights are trained.
    """

    name: str
    tokenizer: str
    vocab_size: int
    context_tokens: int
    most_rank: int


def sample_of(
    form: forms.AskSample, sampler: Sampler, model: Model, *, request_id: str = ""
) -> Sample:
    """Return the request for a generator. Raises DataError if no generator can answer it."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(form, name) not in (None, 0):
            forms.refuse(name)
    params = form.sampling_params
    tokens = prompt_of(form)
    if not 0 < len(tokens) < model.context_tokens:
        raise DataError(
            f"the prompt has {len(tokens)} tokens; send 1 to {model.context_tokens - 1}"
        )
    last = form.prompt_logprobs_last_n
    if last is not None and not (form.prompt_logprobs and last < len(tokens)):
        raise DataError(
            f"prompt_logprobs_last_n={last} needs prompt_logprobs, and a longer prompt than that"
        )
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = tuple(part for part in stop or () if isinstance(part, str))
    ids = tuple(part for part in stop or () if isinstance(part, int))
    highest = max([tokens.max(), *ids])
    if highest >= model.vocab_size:
        raise DataError(f"token {highest} is not below the vocabulary's {model.vocab_size}")
    num_top = form.topk_prompt_logprobs
    room = model.context_tokens - len(tokens)
    return Sample(
        request_id=request_id,
        token_ids=tokens,
        num_samples=form.num_samples,
        max_tokens=min(params.max_tokens or room, room),
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        seed=params.seed,
        stop_texts=texts,
        # Texts alone stop next to the model's end tokens; an empty list stops nothing.
        stop_ids=None if stop is None or (texts and not ids) else ids,
        adapter=sampler.adapter,
        policy=folder_of(sampler.run_id) if sampler.is_inflight else "",
        version=sampler.version,
        num_top=form.topk_sample_logprobs,
        num_prompt_top=num_top if form.prompt_logprobs or num_top else None,
    )


def prompt_of(form: forms.AskSample) -> IntArray:
    """Return the tokens of a prompt, int32 [P]."""
    return np.array([token for chunk in form.prompt.chunks for token in chunk.tokens], np.int32)


def encoded(sampled: Sampled, form: forms.AskSample) -> bytes:
    """Return the answer of the generators in the form of the API, with the version of each token in
    an additional field.
    """
    response = SampleResponse()
    for sequence in sampled.sequences:
        made = response.sequences.add(
            stop_reason=int(sequence.is_truncated),
            tokens=_bytes(sequence.token_ids, "<i4"),
            logprobs=_bytes(sequence.logprobs, "<f4"),
            versions=_bytes(sequence.versions, "<i4"),
        )
        if (top := sequence.likeliest) is not None:
            # Outside of top_k and top_p a token has the log-prob -inf.
            logprobs = np.maximum(top.logprobs, _NO_ALTERNATIVE)
            _fill(made.topk_sampled_logprobs, top.ids, logprobs)
    num_top = form.topk_prompt_logprobs
    own, likeliest = np.split(sampled.prompt.logprobs, [1], axis=1)
    top_ids = sampled.prompt.ids[:, 1:]
    skipped = max(len(own) - (form.prompt_logprobs_last_n or len(own) - 1), 1)
    is_empty = np.arange(len(own))[:, None] < skipped
    if form.prompt_logprobs:
        response.prompt_logprobs = _bytes(np.where(is_empty, np.nan, own), "<f4")
    if num_top:
        shown = np.where(is_empty, _NO_ALTERNATIVE, likeliest)
        _fill(response.topk_prompt_logprobs, np.where(is_empty, 0, top_ids), shown)
    return bytes(response.SerializeToString())


def sequences(store: Store) -> Callable[[str], Drawn]:
    """Return a function that finds the sequences of ids. It raises DataError for an unknown id."""

    @functools.cache
    def of_request(request_id: str) -> dict[str, Drawn]:
        request = store.one(Request, "request_id=? AND kind='sample'", request_id)
        if request is None or not request.answer:
            return {}
        # It is deleted with its session.
        sampler = store.one(Sampler, "sampler_id=?", request.owner)
        prompt = prompt_of(forms.read(request.body or b"", forms.AskSample))
        drawn = drawn_of(request.answer, request_id, prompt, sampler.run_id if sampler else "")
        return {sequence.sequence_id: sequence for sequence in drawn}

    def find(sequence_id: str) -> Drawn:
        found = of_request(sequence_id.rpartition(".")[0]).get(sequence_id)
        if found is None:
            raise DataError(f"no sequence {sequence_id!r} was sampled here in the last day")
        return found

    return find


def check(data: Sequence[Datum], run_id: str, store: Store) -> list[IntArray]:
    """Compare what a client says about the origin of its data with what was sampled, and return the
    versions of the targets that this run has sampled. Raises DataError at the first token that is
    not the token of the sequence that its span names, or whose log-prob is not the sampled one. The
    learner checks the rest.
    """
    find = sequences(store)
    versions: list[IntArray] = []
    for index, datum in enumerate(data):
        targets = datum.inputs.get("target_tokens", datum.tokens)
        _compare(f"datum {index}: model_input", datum.tokens, datum.input_spans, find, None)
        logprobs = datum.inputs.get("logprobs")
        name = f"datum {index}: target_tokens"
        sampled = _compare(name, targets, datum.target_spans, find, logprobs)
        versions += [of_span for owner, of_span in sampled if owner == run_id]
    return versions


def _compare(
    name: str,
    tokens: AnyArray,
    spans: Spans,
    find: Callable[[str], Drawn],
    logprobs: AnyArray | None,
) -> list[tuple[str, IntArray]]:
    """Return owner and versions of each sampled span."""
    sampled: list[tuple[str, IntArray]] = []
    covered = sum(it.sampled_tokens.length + it.prompt_tokens.length for it in spans)
    if spans and (tokens.ndim != 1 or covered != len(tokens)):
        raise DataError(f"{name} has the shape {tokens.shape}, and spans of {covered} tokens")
    start = 0
    for message in spans:
        is_sampled = message.HasField("sampled_tokens")
        span = message.sampled_tokens if is_sampled else message.prompt_tokens
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
            sampled.append((drawn.run_id, drawn.versions[span.offset : end]))
            if logprobs is not None and logprobs.shape == tokens.shape:
                pairs.append((f"{name}: logprobs", logprobs, drawn.logprobs))
        for label, claimed, true in pairs:
            wrong = np.flatnonzero(claimed[start : start + span.length] != true[span.offset : end])
            if len(wrong):
                here = start + wrong[0]
                there = span.offset + wrong[0]
                raise DataError(
                    f"{label}[{here}] is {claimed[here]}, and {true[there]} at {there} of"
                    f" {span.sequence_id}"
                )
        start += span.length
    return sampled


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


def _fill(table: Any, ids: IntArray, logprobs: FloatArray) -> None:
    table.token_ids = _bytes(ids, "<i4")
    table.logprobs = _bytes(logprobs, "<f4")
    table.length, table.k = ids.shape


def _bytes(array: IntArray | FloatArray, dtype: str) -> bytes:
    return array.astype(dtype).tobytes()
