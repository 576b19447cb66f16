"""Settings of what generates: the model, how responses are sampled, the engine and the pool of
generators.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None
    """directory or hub name of a Hugging Face causal LM; null = the embedded tiny_coder"""
    dtype: Literal["float32", "bfloat16"]
    """compute type of learner and generators; master weights are float32"""
    trust_remote_code: bool
    """let transformers run code that comes with the model"""
    external_lib: Annotated[str, Field(pattern="^[\\w.]+$")] | None
    """module imported before the model is made, which may register its architecture; null = none"""
    override_config: list[Annotated[str, Field(pattern="^\\w+=.+$")]]
    """field=value in place of what the model's config.json says, the value as JSON"""


class VllmConfig(Section):
    """Settings handed to vLLM."""

    tensor_parallel_size: Annotated[int, Field(ge=1)]
    """devices of one engine"""
    max_num_seqs: Annotated[int, Field(ge=1)]
    """sequences decoded together"""
    max_num_batched_tokens: Annotated[int, Field(ge=1)]
    """tokens of one engine step"""
    kv_cache_mb: Annotated[int, Field(ge=0)]
    """MB of KV cache per engine on CPU, and on GPU where not 0; 0 = by gpu_memory_utilization"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    """share of the GPU's memory for the engine"""
    enforce_eager: bool
    """no compilation, no CUDA graphs"""
    load_format: Literal["auto", "dummy"]
    """dummy = random weights until the first push"""


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    engine: Literal["vllm", "hf"]
    """vllm, or transformers generate for debugging"""
    group_size: Annotated[int, Field(ge=1)]
    """samples per prompt that are trained"""
    generation_size: Annotated[int, Field(ge=1)] | None
    """samples per prompt, of which the group_size best are kept; null = group_size"""
    temperature: Annotated[float, Field(gt=0, le=10)]
    """divides the logits, of the learner too"""
    ignore_eos: bool
    """write on after an end token, up to data.max_response_tokens; for stress tests"""
    max_concurrent_groups: Annotated[int, Field(ge=1)]
    """groups in flight per generator"""
    max_attempts: Annotated[int, Field(ge=1)]
    """times a group is tried before it is dropped"""
    vllm: VllmConfig


class AutoscaleConfig(Section):
    """How many generators there are while the run is live, if the run is to decide."""

    enabled: bool
    """add and remove generators until neither they nor the learner wait"""
    min: Annotated[int, Field(ge=1)]
    """fewest generators"""
    max: Annotated[int, Field(ge=1)]
    """most generators"""
    pool: Annotated[str, Field(min_length=1)]
    """whose number it is: generators, or generators.NAME of a pool that trains"""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """share of time that learner or generators may wait before the number changes"""


class PoolConfig(Section):
    """A further pool of generators, and what differs from the rest; what is left out is as it is
    for the rest.
    """

    count: Annotated[int, Field(ge=0)]
    """processes at the start, until async-rl scale changes it"""
    work: Literal["train", "evaluation", "both"]
    """what they write: training groups, held-out evaluations (which then go nowhere else), or
    both"""
    cores: list[int] | None = None
    """instead of generators.cores"""
    gpus_each: Annotated[float, Field(ge=0)] | None = None
    """instead of generators.gpus_each; with tensor_parallel_size alone as many as that, if
    generators take any"""
    max_concurrent_groups: Annotated[int, Field(ge=1)] | None = None
    """instead of generation.max_concurrent_groups"""
    tensor_parallel_size: Annotated[int, Field(ge=1)] | None = None
    """instead of generation.vllm.tensor_parallel_size"""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """instead of generation.vllm.max_num_seqs"""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    """instead of generation.vllm.max_num_batched_tokens"""
    kv_cache_mb: Annotated[int, Field(ge=0)] | None = None
    """instead of generation.vllm.kv_cache_mb"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """instead of generation.vllm.gpu_memory_utilization"""
    cpus_each: Annotated[int, Field(ge=1)] | None = None
    """instead of cluster.generator_cpus"""
    node_kind: Annotated[str, Field(min_length=1)] | None = None
    """nodes that they may run on: launcher=ray, a custom resource of which each takes 1;
    launcher=slurm, a feature of the node (srun --constraint)"""


class GeneratorsConfig(Section):
    """The pool of generator processes, and further pools of others."""

    count: Annotated[int, Field(ge=0)]
    """processes at the start, until async-rl scale changes it; 0 = wait for that"""
    cores: list[int]
    """CPU cores each may use, by number, dealt out in turn; empty = all"""
    cores_each: Annotated[int, Field(ge=0)]
    """cores per process taken from `cores`; 0 = each may use all of them"""
    gpus_each: Annotated[float, Field(ge=0)]
    """GPUs per process"""
    pools: dict[str, PoolConfig]
    """further pools by name: generators.pools.NAME.<setting>=<value>"""
    autoscale: AutoscaleConfig
