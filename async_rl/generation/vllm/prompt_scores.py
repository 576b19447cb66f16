"""Further columns in the log-probs of a prompt: of chosen tokens, and of tokens that are drawn at
its positions, in the prefill of the request.

vLLM has columns for the token of each position and for the likeliest ones. Its first model runner,
the only one for CPUs, has no others.

Written against vLLM 0.32.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

CHOSEN = "chosen"
"""Extra argument of a request: ids [P - 1, C]; -1 = the cell is not read."""
DRAWN = "drawn"
"""Extra argument: how many tokens are drawn at a position, at the request's temperature."""
_COLDEST = 1e-5


def use_prompt_scores() -> None:
    """Let this process answer the extra arguments."""
    of_vllm: Any = GPUModelRunner._get_prompt_logprobs_dict

    def scores(runner: Any, *batch: Any) -> dict[str, Any]:
        wanted = runner.num_prompt_logprobs
        found: dict[str, Any] = {}
        # One by one: vLLM does not pass the request to the function that gathers the columns.
        for name in list(wanted):
            runner.num_prompt_logprobs = {name: wanted[name]}
            extra = runner.requests[name].sampling_params.extra_args or {}
            if CHOSEN in extra:
                runner.sampler.gather_logprobs = _Columns(runner.requests[name], extra)
            found |= of_vllm(runner, *batch)
            runner.sampler.gather_logprobs = Sampler.gather_logprobs
            if not runner.num_prompt_logprobs:
                del wanted[name]
        runner.num_prompt_logprobs = wanted
        return found

    GPUModelRunner._get_prompt_logprobs_dict = scores


class _Columns:
    """Gathers the columns of one request."""

    def __init__(self, request: Any, extra: dict[str, Any]) -> None:
        self._first = request.num_computed_tokens
        self._chosen = extra[CHOSEN]
        self._num_drawn = extra[DRAWN]
        self._temperature = max(request.sampling_params.temperature, _COLDEST)
        self._generator = request.generator

    def __call__(self, logprobs: Tensor, num_columns: int, token_ids: Tensor) -> LogprobsTensors:
        """Return the columns of N positions: float32 [N, V] -> [N, 1 + num_columns]."""
        rows = self._chosen[self._first : self._first + len(logprobs)]
        ids = torch.tensor(rows, dtype=torch.int64, device=logprobs.device)
        if self._num_drawn:
            shares = (logprobs / self._temperature).softmax(-1)
            drawn = torch.multinomial(
                shares, self._num_drawn, replacement=True, generator=self._generator
            )
            ids = torch.cat([ids, drawn], dim=1)
        likeliest = Sampler.gather_logprobs(logprobs, num_columns - ids.shape[1], token_ids)
        own = logprobs.gather(-1, ids.clamp(min=0))
        return LogprobsTensors(
            torch.cat([likeliest.logprob_token_ids, ids.int()], dim=1),
            torch.cat([likeliest.logprobs, own], dim=1),
            likeliest.selected_token_ranks,
        )
