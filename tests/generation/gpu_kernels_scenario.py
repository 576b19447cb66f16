# ruff: noqa: E402
"""Runs the Triton kernels of vLLM's Model Runner V2, which samples on GPUs, on tensors in main
memory.

A process of its own: Triton reads TRITON_INTERPRET at import, and vLLM decides at import whether
there is a Triton for its device.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}

import numpy as np
import torch
from triton import knobs
from triton.backends import backends

# vLLM's CPU build uses Triton only if it has a backend of this name; the interpreter needs none.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.sampling_params import SamplingParams
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

# Memory that CPU and GPU address alike needs a GPU; the buffers that copy instead need none.
buffer_utils.is_uva_available = lambda: False

VOCABULARY = 1100  # more than a block of 1024, and not a multiple of one
CPU = torch.device("cpu")


def sampler_of(temperatures: list[float]) -> Sampler:
    """vLLM's sampler with a request per temperature, as the engine asks for log-probs."""
    states = RequestState(
        max_num_reqs=len(temperatures),
        max_model_len=64,
        max_num_batched_tokens=64,
        num_speculative_steps=0,
        vocab_size=VOCABULARY,
        device=CPU,
    )
    config: Any = SimpleNamespace(speculative_config=None, num_speculative_tokens=0)
    config.reasoning_config = None
    sampler = Sampler(
        config, len(temperatures), VOCABULARY, CPU, states, logprobs_mode="processed_logprobs"
    )
    for index, temperature in enumerate(temperatures):
        states.add_request(f"r{index}", 4, [1, 2, 3, 4], 0, 9)
        params = SamplingParams(temperature=temperature, logprobs=0, max_tokens=9, seed=index)
        sampler.add_request(index, params)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler


def sampled(sampler: Sampler, logits: torch.Tensor, requests: list[int], first: int = 4) -> Any:
    """One step with a row per request, at positions from `first` on."""
    rows = torch.arange(len(requests), dtype=torch.int32)
    mapping = torch.tensor(requests, dtype=torch.int32)
    ends = torch.arange(len(requests) + 1, dtype=torch.int32)
    batch: Any = SimpleNamespace(
        num_reqs=len(requests),
        idx_mapping=mapping,
        idx_mapping_np=mapping.numpy(),
        expanded_idx_mapping=mapping,
        expanded_local_pos=torch.zeros_like(mapping),
        cu_num_logits=ends,
        cu_num_logits_np=ends.numpy(),
        positions=first + rows.long(),
        input_ids=torch.zeros(len(requests), dtype=torch.int32),
        logits_indices=rows.long(),
        seq_lens=torch.full((len(requests),), 5, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((len(requests),), 5, dtype=torch.int32),
    )
    return sampler(logits, batch)


def of_samples() -> dict[str, Any]:
    """Tokens, log-probs and logits of requests with different temperatures, in another order."""
    temperatures = [0.7, 1.0, 0.0, 2.0]
    requests = [3, 1, 0, 2]
    logits = 4 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits = logits.bfloat16()
    sampler = sampler_of(temperatures)
    output = sampled(sampler, logits.clone(), requests)
    return {
        "logits": logits.float(),
        "temperatures": torch.tensor([temperatures[request] for request in requests]),
        "tokens": output.sampled_token_ids[:, 0],
        "logprobs": output.logprobs_tensors.logprobs[:, 0],
    }


def of_prompts() -> dict[str, Any]:
    """Log-probs of two prompts, one of which is computed in two steps, as the probe asks."""
    rows = torch.randint(
        0, VOCABULARY, (2, 12), dtype=torch.int32, generator=torch.Generator().manual_seed(2)
    )
    # The kernel reads the token after a prompt's last one, as the target of a log-prob that is not
    # used. vLLM's table has room for it; beyond an exact one lies any number, and the logit of such
    # a token is at an address that may not exist: a segmentation fault in one run of three.
    table = torch.zeros(2, 64, dtype=torch.int32)
    table[:, :12] = rows
    hidden = 3 * torch.randn(2, 12, VOCABULARY, generator=torch.Generator().manual_seed(3))
    hidden = hidden.bfloat16()
    worker = PromptLogprobsWorker(2, CPU, "processed_logprobs")
    for index in range(2):
        worker.add_request(f"r{index}", index, SamplingParams(prompt_logprobs=0, temperature=0.0))
    found: dict[str, Any] = {}
    for computed, lengths in (([0, 0], [12, 5]), ([12, 5], [0, 7])):
        active = [index for index in range(2) if lengths[index]]
        ends = np.cumsum([0, *(lengths[index] for index in active)])
        mapping = torch.tensor(active, dtype=torch.int32)
        batch: Any = SimpleNamespace(
            req_ids=[f"r{index}" for index in active],
            idx_mapping=mapping,
            idx_mapping_np=mapping.numpy(),
            num_tokens=int(ends[-1]),
            query_start_loc=torch.tensor(ends, dtype=torch.int32),
            query_start_loc_np=ends,
            num_scheduled_tokens=np.array([lengths[index] for index in active]),
            num_computed_prefill_tokens_np=np.array([computed[index] for index in active]),
            prefill_len_np=np.array([12 for _ in active]),
        )
        states = torch.cat([hidden[i, computed[i] : computed[i] + lengths[i]] for i in active])
        steps = torch.tensor(computed, dtype=torch.int32)
        out = worker.compute_prompt_logprobs(
            lambda part: part, states, batch, table, steps, np.array([12, 12])
        )
        found |= {name: value.logprobs[:, 0] for name, value in out.items()}
    return {"rows": rows, "logits": hidden.float(), "logprobs": found}


if __name__ == "__main__":
    assert HAS_TRITON, "vLLM took its placeholder for Triton"
    said = {"samples": of_samples(), "prompts": of_prompts()}
    # tl.dot takes it where a kernel names no precision.
    said["float32_products"] = knobs.language.fp32_default
    torch.save(said, sys.argv[1])
