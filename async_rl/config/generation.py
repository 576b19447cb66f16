"""Settings of what generates: the model, how responses are sampled, the engine and the pool of
generators.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class ModelConfig(Section):
    """The policy that is trained."""

    path: Annotated[
        str | None,
        Meta(
            description=(
                "directory or hub name of a Hugging Face causal LM; null = the embedded tiny_coder"
            )
        ),
    ]
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="compute type of learner and generators; master weights are float32"),
    ]
    trust_remote_code: Annotated[
        bool, Meta(description="let transformers run code that comes with the model")
    ]
    external_lib: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.]+$")] | None,
        Meta(
            description=(
                "module imported before the model is made, which may register its architecture;"
                " null = none"
            )
        ),
    ]
    override_config: Annotated[
        list[Annotated[str, Meta(pattern=r"^\w+=.+$")]],
        Meta(
            description=(
                "field=value in place of what the model's config.json says, the value as JSON"
            )
        ),
    ]


class VllmConfig(Section):
    """Settings handed to vLLM."""

    tensor_parallel_size: Annotated[int, Meta(ge=1, description="devices of one engine")]
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences decoded together")]
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="tokens of one engine step")]
    kv_cache_mb: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "MB of KV cache per engine on CPU, and on GPU where not 0; 0 = by"
                " gpu_memory_utilization"
            ),
        ),
    ]
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of the GPU's memory for the engine")
    ]
    enforce_eager: Annotated[bool, Meta(description="no compilation, no CUDA graphs")]
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy = random weights until the first push")
    ]


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    engine: Annotated[
        Literal["vllm", "hf"], Meta(description="vllm, or transformers generate for debugging")
    ]
    group_size: Annotated[int, Meta(ge=1, description="samples per prompt that are trained")]
    generation_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "samples per prompt, of which the group_size best are kept; null = group_size"
            )
        ),
    ]
    temperature: Annotated[
        float, Meta(gt=0, le=10, description="divides the logits, of the learner too")
    ]
    ignore_eos: Annotated[
        bool,
        Meta(
            description=(
                "write on after an end token, up to data.max_response_tokens; for stress tests"
            )
        ),
    ]
    max_concurrent_groups: Annotated[int, Meta(ge=1, description="groups in flight per generator")]
    max_attempts: Annotated[
        int, Meta(ge=1, description="times a group is tried before it is dropped")
    ]
    vllm: VllmConfig


class AutoscaleConfig(Section):
    """How many generators there are while the run is live, if the run is to decide."""

    enabled: Annotated[
        bool, Meta(description="add and remove generators until neither they nor the learner wait")
    ]
    min: Annotated[int, Meta(ge=1, description="fewest generators")]
    max: Annotated[int, Meta(ge=1, description="most generators")]
    pool: Annotated[
        str,
        Meta(
            min_length=1,
            description="whose number it is: generators, or generators.NAME of a pool that trains",
        ),
    ]
    tolerance: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description=(
                "share of time that learner or generators may wait before the number changes"
            ),
        ),
    ]


class PoolConfig(Section, omit_defaults=True):
    """A further pool of generators, and what differs from the rest; what is left out is as it is
    for the rest.
    """

    count: Annotated[
        int, Meta(ge=0, description="processes at the start, until async-rl scale changes it")
    ]
    work: Annotated[
        Literal["train", "evaluation", "both"],
        Meta(
            description=(
                "what they write: training groups, held-out evaluations (which then go nowhere"
                " else), or both"
            )
        ),
    ]
    cores: Annotated[list[int] | None, Meta(description="instead of generators.cores")] = None
    gpus_each: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description=(
                "instead of generators.gpus_each; with tensor_parallel_size alone as many as that,"
                " if generators take any"
            )
        ),
    ] = None
    max_concurrent_groups: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="instead of generation.max_concurrent_groups"),
    ] = None
    tensor_parallel_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="instead of generation.vllm.tensor_parallel_size"),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="instead of generation.vllm.max_num_seqs"),
    ] = None
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="instead of generation.vllm.max_num_batched_tokens"),
    ] = None
    kv_cache_mb: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="instead of generation.vllm.kv_cache_mb"),
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="instead of generation.vllm.gpu_memory_utilization"),
    ] = None
    cpus_each: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="instead of cluster.generator_cpus")
    ] = None
    node_kind: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description=(
                "nodes that they may run on: launcher=ray, a custom resource of which each takes 1;"
                " launcher=slurm, a feature of the node (srun --constraint)"
            )
        ),
    ] = None


class GeneratorsConfig(Section):
    """The pool of generator processes, and further pools of others."""

    count: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "processes at the start, until async-rl scale changes it; 0 = wait for that"
            ),
        ),
    ]
    cores: Annotated[
        list[int],
        Meta(description="CPU cores each may use, by number, dealt out in turn; empty = all"),
    ]
    cores_each: Annotated[
        int,
        Meta(
            ge=0, description="cores per process taken from `cores`; 0 = each may use all of them"
        ),
    ]
    gpus_each: Annotated[float, Meta(ge=0, description="GPUs per process")]
    pools: Annotated[
        dict[str, PoolConfig],
        Meta(description="further pools by name: generators.pools.NAME.<setting>=<value>"),
    ]
    autoscale: AutoscaleConfig
