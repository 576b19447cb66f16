"""A sample in vLLM: the parameters of its request, the limits top-k and top-p on its
tokens, and the tokens with their log-probs that it becomes.

vLLM keeps all tokens whose logit equals the k-th, which in bfloat16 are often several, and reports
k of them. So a record of the tokens that remained would be incomplete. `Truncation` keeps exactly
k.

Written against vLLM 0.32.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from async_rl.batching.support import truncate
from async_rl.core.errors import DataError, Unavailable
from async_rl.core.types import FloatArray, IntArray, Sampling
from async_rl.protocol.generator import Completion, Scores
from async_rl.protocol.service import Sample

_NUMBERS: dict[str, int] = {}
"""vLLM's numbers of adapters in directories, from 1000 on; slots have smaller numbers."""
_GREEDY = 1e-5
"""A lower temperature is 0 to vLLM (_SAMPLING_EPS)."""
LIMITS = "limits"
"""Extra argument of a request: top_k and top_p."""
EARLIER = "earlier"
"""The extra argument of a request with earlier responses, as in `Sampling.drafts`."""
REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM raises for a request that it does not serve."""
_WEIGHTS = "adapter_model.safetensors"


def rollout_params(
    sampling: Sampling, num_samples: int, end_token_ids: Sequence[int]
) -> SamplingParams:
    """Return vLLM's parameters of a request of a rollout. end_token_ids: none = no token ends a
    sample.
    """
    support = sampling.support
    extra: dict[str, object] | None = None
    if _truncates(sampling):
        extra = {LIMITS: (support.top_k, support.top_p)}
    elif sampling.drafts:
        extra = {EARLIER: sampling.drafts}
    grammar = None
    if support.grammar:
        grammar = StructuredOutputsParams(**{support.grammar_kind: support.grammar})
    num_kept = support.top_k if _records_kept(sampling) else 0
    return SamplingParams(
        n=num_samples,
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        min_tokens=min(support.min_tokens, sampling.max_new_tokens),
        logit_bias=support.logit_bias or None,
        structured_outputs=grammar,
        extra_args=extra,
        stop_token_ids=list(end_token_ids),
        ignore_eos=not end_token_ids,
        logprobs=max(num_kept, sampling.alternatives.num_top),
        prompt_logprobs=sampling.alternatives.num_prompt_top,
        flat_logprobs=True,
        detokenize=False,
        # With DELTA, vLLM would send each sample in parts, which are not read before its end.
        output_kind=RequestOutputKind.CUMULATIVE,
        # In tokens: vLLM then reports a sample at its first token and at its end only.
        stream_interval=1 << 30,
    )


def _records_kept(sampling: Sampling) -> bool:
    return _truncates(sampling) and sampling.support.is_recorded


def _truncates(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and sampling.support.is_truncated


def params_of(request: Sample, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return vLLM's parameters of a request. end_token_ids: the model's. Raises DataError if vLLM
    refuses them.
    """
    stops = end_token_ids if request.stop_ids is None else request.stop_ids
    try:
        return SamplingParams(
            # Greedy samples of a prompt are equal, and vLLM draws only one.
            n=1 if request.temperature < _GREEDY else request.num_samples,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            stop=list(request.stop_texts),
            stop_token_ids=list(stops),
            # The end tokens are among the stops, unless the request replaces them.
            ignore_eos=True,
            logprobs=request.num_top,
            prompt_logprobs=request.num_prompt_top,
            flat_logprobs=True,
            detokenize=bool(request.stop_texts),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except REFUSALS as error:
        raise DataError(f"the sample is refused: {error}") from error


def adapter_in(directory: str) -> LoRARequest:
    """Return vLLM's name of an adapter. Raises DataError if the directory has none."""
    try:
        written = (Path(directory) / _WEIGHTS).stat().st_mtime_ns
    except OSError as error:
        raise DataError(f"{directory} has no adapter: {error}") from error
    # With the time: a directory that was written again has another prefix cache.
    name = f"{directory}@{written}"
    return LoRARequest(name, _NUMBERS.setdefault(name, 1000 + len(_NUMBERS)), directory)


class Truncation(LogitsProcessor):
    """Applies the limits of a request after the temperature."""

    def __init__(self, *_: object) -> None:
        self._limits: dict[int, tuple[int, float]] = {}

    def is_argmax_invariant(self) -> bool:
        """The likeliest token always remains."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their rows."""
        process_dict_updates(
            self._limits,
            batch_update,
            lambda params, *_: (params.extra_args or {}).get(LIMITS),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude tokens: float32 [B, V], in place."""
        for limits in set(self._limits.values()):
            rows = [row for row, own in self._limits.items() if own == limits]
            logits[rows] = truncate(logits[rows], *limits)
        return logits


class WrittenLogprobs:
    """The log-probs of all tokens of one output, without alternatives."""

    def __init__(self, values: FloatArray) -> None:
        self.values = values

    def __radd__(self, cumulative_logprob: float) -> float:
        """vLLM adds every entry to a sum that this project does not read."""
        return cumulative_logprob


def completion_of(
    sample: CompletionOutput, scores: Scores, versions: IntArray, num_top: int
) -> Completion:
    """Return a finished sample. scores: of its tokens and of the likeliest ones, of which it has
    num_top. Raises Unavailable if it was ended early.
    """
    # An aborted sample has too few tokens, and would be trained as if the policy had finished it.
    if sample.finish_reason not in ("stop", "length"):
        raise Unavailable(f"vLLM ended sample {sample.index} early ({sample.finish_reason})")
    top = slice(1, 1 + num_top)
    return Completion(
        index=sample.index,
        token_ids=np.array(sample.token_ids, np.int32),
        logprobs=scores.logprobs[:, 0],
        versions=versions,
        is_truncated=sample.finish_reason == "length",
        likeliest=Scores(ids=scores.ids[:, top], logprobs=scores.logprobs[:, top])
        if num_top
        else None,
    )


def scores_of(sample: CompletionOutput, num_top: int) -> Scores:
    """Return the N tokens of a sample and the likeliest ones at their positions, [N, 1 + num_top].

    The entries come from `ThreadedCore`, or from vLLM's own core with 1 + num_top per token.
    """
    entries = sample.logprobs.logprobs
    if entries and isinstance(entries[0], WrittenLogprobs):
        values = np.concatenate([entry.values for entry in entries])
        return Scores(ids=np.array(sample.token_ids, np.int32)[:, None], logprobs=values[:, None])
    return _columns(sample.logprobs, num_top)


def prompt_scores(output: RequestOutput, num_top: int | None) -> Scores:
    """Return the log-probs of a prompt: [P, 1 + num_top], as in `Sampled`; None = [P, 0]."""
    shape = (len(output.prompt_token_ids or ()), 0 if num_top is None else num_top + 1)
    scores = Scores(ids=np.zeros(shape, np.int32), logprobs=np.full(shape, np.nan, np.float32))
    if num_top is not None and isinstance(output.prompt_logprobs, FlatLogprobs):
        found = _columns(output.prompt_logprobs, num_top)
        # The first token has no entry.
        scores.ids[1:] = found.ids
        scores.logprobs[1:] = found.logprobs
    return scores


def kept_tokens(sampling: Sampling, scores: Scores) -> list[IntArray]:
    """Return the tokens with a probability above 0 at each position, ascending; none unless the
    request records them.
    """
    if not _records_kept(sampling):
        return []
    rows = zip(scores.ids, scores.logprobs, strict=True)
    return [np.unique(ids[row > -np.inf]) for ids, row in rows]


def _columns(flat: FlatLogprobs, num_top: int) -> Scores:
    shape = (-1, 1 + num_top)
    return Scores(
        ids=np.array(flat.token_ids, np.int32).reshape(shape),
        logprobs=np.array(flat.logprobs, np.float32).reshape(shape),
    )
