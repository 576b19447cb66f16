"""The parameters of a sample of the training service, and the adapters that samples name.

Written against vLLM 0.32.
"""

from collections.abc import Sequence
from pathlib import Path

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from async_rl.core.errors import DataError
from async_rl.protocol.service import Sample

_NUMBERS: dict[str, int] = {}
"""vLLM's numbers of adapters in directories, from 1000 on; slots have smaller numbers."""
_GREEDY = 1e-5
"""A lower temperature is 0 to vLLM (_SAMPLING_EPS)."""
EARLIER = "earlier"
"""The extra argument of a request with earlier responses, as in `Sampling.drafts`."""
REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM raises for a request that it does not serve."""
_WEIGHTS = "adapter_model.safetensors"


def adapter_in(directory: str) -> LoRARequest:
    """Return vLLM's name of an adapter. Raises DataError if the directory has none."""
    try:
        written = (Path(directory) / _WEIGHTS).stat().st_mtime_ns
    except OSError as error:
        raise DataError(f"{directory} has no adapter: {error}") from error
    # With the time: a directory that was written again has another prefix cache.
    name = f"{directory}@{written}"
    return LoRARequest(name, _NUMBERS.setdefault(name, 1000 + len(_NUMBERS)), directory)


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
