"""`generation.vllm.extra`: further arguments of vLLM's engine, checked without importing vllm.

Invariant: an argument is passed on only if the project does not set it and if pushes, labels and
log-probs stay what generation/engine.py promises. An argument that changes how the engine computes
(quantization, dtype of the KV cache, attention backend) is passed on: the probe after a push and
`mismatch/engine_abs_mean` measure it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_SETTINGS = {
    "dtype": "model.dtype",
    "enable_sleep_mode": "placement=colocated",
    "enforce_eager": "generation.vllm.enforce_eager",
    "gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    # Rope scaling among them: the learner must compute with it too.
    "hf_overrides": "model.override_config, which the learner reads too",
    "kv_cache_memory_bytes": "generation.vllm.kv_cache_mb",
    "load_format": "model.path, which every engine loads",
    "max_model_len": "data.max_prompt_tokens and data.max_response_tokens",
    "max_num_batched_tokens": "generation.vllm.max_num_batched_tokens",
    "max_num_seqs": "generation.vllm.max_num_seqs",
    "model": "model.path",
    "seed": "seed",
    "tensor_parallel_size": "generation.vllm.tensor_parallel_size",
    "trust_remote_code": "model.trust_remote_code",
}
"""Arguments that follow from other settings."""
_SAMPLING = "samples would not be drawn from the policy that the learner trains"
_PUSHES = "weight pushes and the versions of tokens depend on the value that the project sets"
_TOKENS = "the engine gets and returns token ids only"
_REFUSED = {
    "diffusion_config": _SAMPLING,
    "disable_log_stats": "the project sets it, because it has its own metrics",
    "distributed_executor_backend": _PUSHES,
    "enable_elastic_ep": "a push addresses a fixed number of workers",
    "enable_lora": "a push loads the weights of the whole model",
    "enable_prefix_caching": "the samples of a group share one prefill of their prompt",
    "enable_trace_replay": _SAMPLING,
    "generation_config": _SAMPLING,
    "io_processor_plugin": _TOKENS,
    "logits_processors": _SAMPLING,
    "logprobs_mode": "log-probs would belong to another distribution than the samples",
    "override_generation_config": _SAMPLING,
    "pooler_config": _TOKENS,
    "reasoning_config": _SAMPLING,
    "runner": _TOKENS,
    "scheduler_cls": _PUSHES,
    "skip_tokenizer_init": _TOKENS,
    "structured_outputs_config": _SAMPLING,
    "tokenizer": _TOKENS,
    "watermark_config": _SAMPLING,
    "weight_transfer_config": _PUSHES,
    "worker_cls": _PUSHES,
    "worker_extension_cls": _PUSHES,
}
"""Arguments that would break a promise, with the reason."""
_REFUSED_PREFIXES = {
    # An engine with replicas reports the workers of the first one only (vLLM 0.32), so a broadcast
    # would wait for ranks that were not counted.
    "data_parallel_": "each replica is a generator here: raise generators.count",
    "kv_transfer_": "blocks computed by older weights would be read",
    "kv_offloading_": "blocks computed by older weights would be read",
}


def extra_problems(
    entries: Sequence[str], *, is_eager: bool = False, is_gpu: bool = False
) -> Iterator[str]:
    """Yield a line for each entry that cannot be passed on. Names that the installed vLLM does not
    have are found where vLLM is (generation/vllm/installed.py).

    is_eager: generation.vllm.enforce_eager; is_gpu: generators have GPUs.
    """
    given: set[str] = set()
    for entry in entries:
        name = entry.partition("=")[0]
        path = f"generation.vllm.extra={entry}"
        prefix = next((start for start in _REFUSED_PREFIXES if name.startswith(start)), "")
        if name in given:
            yield f"{path}: {name} is given twice; give it once"
        elif name in _SETTINGS:
            yield f"{path}: the project sets {name}; set {_SETTINGS[name]}"
        elif name in _REFUSED or prefix:
            reason = _REFUSED.get(name) or _REFUSED_PREFIXES[prefix]
            yield f"{path}: {reason}; remove it"
        elif name == "speculative_config" and (is_gpu or '"ngram"' not in entry):
            # Drafts of a model would need pushes of their own.
            yield f"{path}: log-probs are checked for drafts by ngram on a CPU only; remove it"
        elif is_eager and name == "compilation_config":
            # vLLM would replace it without an error.
            eager = "generation.vllm.enforce_eager"
            yield f"{path}: {eager}=true compiles nothing; set {eager}=false, or remove the entry"
        given.add(name)
