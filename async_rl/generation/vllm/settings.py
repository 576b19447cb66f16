"""The arguments of vLLM that follow from the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.generation.engine import ModelFacts
from async_rl.generation.environment import uses_gpu

_EXTENSION = "async_rl.generation.vllm.worker.SharedWeightsExtension"
_CPU_BLOCK_TOKENS = 32
"""The smallest block of vLLM's attention on CPU. Prompts share whole blocks, so smaller blocks
share more of a short prompt.
"""


def engine_args(
    config: RunConfig, model_path: Path, facts: ModelFacts, seed: int
) -> AsyncEngineArgs:
    """Raises ConfigError if prompt and response exceed the model's positions."""
    data, vllm = config.data, config.generation.vllm
    longest = data.max_prompt_tokens + data.max_response_tokens
    if longest > facts.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} +"
            f" data.max_response_tokens={data.max_response_tokens} exceed the {facts.max_positions}"
            f" positions of the model in {model_path}; lower one of them"
        )
    is_on_gpu = uses_gpu(config)
    settings: dict[str, Any] = {}
    if vllm.kv_cache_mb:
        settings["kv_cache_memory_bytes"] = vllm.kv_cache_mb << 20
    if vllm.enforce_eager:
        settings["compilation_config"] = {"mode": 0}
    if not is_on_gpu:
        settings["block_size"] = _CPU_BLOCK_TOKENS
    elif config.placement == "colocated":
        settings["enable_sleep_mode"] = True
    return AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,
        trust_remote_code=config.model.trust_remote_code,
        dtype=config.model.dtype,
        seed=seed,
        load_format=vllm.load_format,
        use_tqdm_on_load=False,
        tensor_parallel_size=vllm.tensor_parallel_size,
        distributed_executor_backend="uni" if vllm.tensor_parallel_size == 1 else "mp",
        worker_extension_cls=_EXTENSION,
        # One more than a trajectory: a probe of a whole one generates a token.
        max_model_len=min(longest + 1, facts.max_positions),
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        enforce_eager=vllm.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        generation_config="vllm",
        **settings,
    )
