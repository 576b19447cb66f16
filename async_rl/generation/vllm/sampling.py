"""Samples of the training service: every setting of a request, log-probs of prompts, and
alternatives of tokens.

Written against vLLM 0.32.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from async_rl.core.errors import DataError, Unavailable
from async_rl.core.types import IntArray
from async_rl.generation.vllm.logprobs import columns_of, logprobs_of
from async_rl.generation.vllm.prompt_scores import CHOSEN, DRAWN
from async_rl.protocol.generator import Scores
from async_rl.protocol.service import Sample, Sampled, SampledSequence

_FIRST_ID = 1000
"""The number of the first adapter that comes from a directory; slots have smaller numbers."""
_NO_ALTERNATIVE = -99999.0
_GREEDY = 1e-5
"""A lower temperature is 0 to vLLM (_SAMPLING_EPS)."""
EARLIER = "earlier"
"""The extra argument of a request with earlier responses, as in `Sampling.drafts`."""
REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM raises for a request that it does not serve."""
_WEIGHTS = "adapter_model.safetensors"

Ask = Callable[[Sequence[int], SamplingParams], AsyncGenerator[RequestOutput, None]]


class Directories:
    """The adapters in directories that an engine has served, by number for vLLM."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def request(self, directory: str) -> LoRARequest:
        """Return vLLM's name of an adapter. Raises DataError if the directory has none."""
        try:
            written = (Path(directory) / _WEIGHTS).stat().st_mtime_ns
        except OSError as error:
            raise DataError(f"{directory} has no adapter: {error}") from error
        # With the time: a directory that was written again has another prefix cache.
        name = f"{directory}@{written}"
        number = self._numbers.setdefault(name, _FIRST_ID + len(self._numbers))
        return LoRARequest(name, number, directory)


async def draw(
    request: Sample,
    ask: Ask,
    *,
    end_token_ids: Sequence[int],
    versions: Callable[[CompletionOutput], IntArray],
) -> Sampled:
    """Draw the sequences of a request.

    ask: the engine's outputs for a prompt; end_token_ids: the model's; versions: of the tokens of a
    finished sample, int32 [N].  Raises DataError for a request that vLLM refuses, Unavailable if a
    sample was ended early.
    """
    try:
        params = _params(request, end_token_ids)
    except REFUSALS as error:
        raise DataError(f"the sample is refused: {error}") from error
    async with aclosing(ask(request.token_ids.tolist(), params)) as outputs:
        async for output in outputs:
            last = output
    drawn = [
        _sequence(sample, versions(sample), request.num_top)
        for sample in sorted(last.outputs, key=lambda sample: sample.index)
    ]
    scores = prompt_scores(last, len(request.token_ids), params.prompt_logprobs)
    return Sampled(
        sequences=drawn * (request.num_samples // len(drawn)),
        prompt_ids=scores.ids,
        prompt_logprobs=scores.logprobs,
    )


def prompt_scores(output: RequestOutput, num_tokens: int, num_top: int | None) -> Scores:
    """Return the log-probs of a prompt: [P, 1 + num_top], as in `Sampled`; None = [P, 0]."""
    shape = (num_tokens, 0 if num_top is None else num_top + 1)
    ids = np.zeros(shape, np.int32)
    logprobs = np.full(shape, np.nan, np.float32)
    if num_top is not None and isinstance(output.prompt_logprobs, FlatLogprobs):
        # The first token has no entry.
        logprobs[1:], ids[1:] = columns_of(output.prompt_logprobs, num_top)
    return Scores(ids=ids, logprobs=logprobs)


def _num_drawn(request: Sample) -> int:
    """Greedy samples of a prompt are equal, and vLLM draws only one."""
    return 1 if request.temperature < _GREEDY else request.num_samples


def _params(request: Sample, end_token_ids: Sequence[int]) -> SamplingParams:
    stops = end_token_ids if request.stop_ids is None else request.stop_ids
    width = request.num_prompt_top
    extra = None
    if width is not None and (request.chosen is not None or request.num_drawn):
        chosen = (
            np.empty((len(request.token_ids) - 1, 0)) if request.chosen is None else request.chosen
        )
        extra = {CHOSEN: chosen.tolist(), DRAWN: request.num_drawn}
        width += chosen.shape[1] + request.num_drawn
    return SamplingParams(
        n=_num_drawn(request),
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
        prompt_logprobs=width,
        extra_args=extra,
        flat_logprobs=True,
        detokenize=bool(request.stop_texts),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sequence(sample: CompletionOutput, versions: IntArray, num_top: int) -> SampledSequence:
    if sample.finish_reason not in ("stop", "length"):
        raise Unavailable(f"vLLM ended sample {sample.index} early ({sample.finish_reason})")
    token_ids = np.array(sample.token_ids, np.int32)
    # The sampled token, then its alternatives.
    if num_top:
        logprobs, ids = columns_of(sample.logprobs, num_top)
    else:
        logprobs = logprobs_of(sample.logprobs)[0][:, None]
        ids = token_ids[:, None]
    return SampledSequence(
        token_ids=token_ids,
        logprobs=logprobs[:, 0],
        versions=versions,
        is_stopped=sample.finish_reason == "stop",
        top_ids=ids[:, 1:],
        # Outside top_k and top_p a token has the log-prob -inf, which JSON cannot have.
        top_logprobs=np.maximum(logprobs[:, 1:], _NO_ALTERNATIVE),
    )
