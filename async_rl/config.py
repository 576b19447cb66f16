"""The schema of a run's configuration: every setting with its unit, its range and its meaning.

Invariants
- No default lives here: `conf/` holds them all.  A missing field is an error, an unknown one too.
- Fields say their unit in the name or in the description; ranges are checked when the configuration is decoded.
- Checks that join several fields are in `check.py`'s `check(config)`; composition from files and overrides is in `launchers/compose.py`.
Read by every process from `<run>/config.yaml`, which is written once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config_algorithm import AlgorithmConfig
from async_rl.config_base import Section
from async_rl.config_data import DataConfig
from async_rl.config_learner import LearnerConfig


class TinyCoderConfig(Section):
    """The embedded model: a small Qwen3 made and warm-started on first use."""

    hidden_size: Annotated[int, Meta(ge=16, description="width")]
    num_layers: Annotated[int, Meta(ge=1, description="decoder layers")]
    num_heads: Annotated[int, Meta(ge=1, description="attention heads")]
    warm_start_steps: Annotated[int, Meta(ge=0, description="supervised steps on the flawed corpus")]
    warm_start_batch: Annotated[int, Meta(ge=1, description="sequences per supervised step")]
    warm_start_lr: Annotated[float, Meta(gt=0, description="peak learning rate of the warm start")]
    flaw_probability: Annotated[
        float, Meta(ge=0, lt=1, description="how often the corpus gets a concept wrong, which leaves something to learn")
    ]
    flaw_spread: Annotated[
        float, Meta(ge=0, le=1, description="concepts are wrong at flaw_probability * (1 -+ flaw_spread), evenly spaced")
    ]
    seed: Annotated[int, Meta(ge=0, description="seed of weights and corpus")]


class ModelConfig(Section):
    """The policy that is trained."""

    path: Annotated[str | None, Meta(description="directory or hub name of a Hugging Face causal LM; null = the embedded tiny_coder")]
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="compute type of learner and generators; master weights are float32")]
    trust_remote_code: Annotated[bool, Meta(description="let transformers run code that comes with the model")]
    tiny_coder: TinyCoderConfig


class VllmConfig(Section):
    """Settings handed to vLLM."""

    tensor_parallel_size: Annotated[int, Meta(ge=1, description="devices of one engine")]
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences decoded together")]
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="tokens of one engine step")]
    kv_cache_mb: Annotated[
        int, Meta(ge=0, description="MB of KV cache per engine on CPU, and on GPU where not 0; 0 = by gpu_memory_utilization")
    ]
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1, description="share of the GPU's memory for the engine")]
    enforce_eager: Annotated[bool, Meta(description="no compilation, no CUDA graphs")]
    load_format: Annotated[Literal["auto", "dummy"], Meta(description="dummy = random weights until the first push")]


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    engine: Annotated[Literal["vllm", "hf"], Meta(description="vllm, or transformers generate for debugging")]
    group_size: Annotated[int, Meta(ge=1, description="samples per prompt that are trained")]
    generation_size: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="samples per prompt, of which the group_size best are kept; null = group_size")
    ]
    temperature: Annotated[float, Meta(gt=0, le=10, description="divides the logits, of the learner too")]
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus; below 1 is refused: the learner's support would differ")]
    top_k: Annotated[int, Meta(ge=-1, description="-1 = all; else refused, as top_p")]
    min_response_tokens: Annotated[
        int, Meta(ge=0, description="tokens before end-of-sequence is allowed; above 0 is refused: it changes the support")
    ]
    max_concurrent_groups: Annotated[int, Meta(ge=1, description="groups in flight per generator")]
    max_attempts: Annotated[int, Meta(ge=1, description="times a group is tried before it is dropped")]
    timeout_s: Annotated[float, Meta(gt=0, description="longest time one group may take in a generator")]
    vllm: VllmConfig


class GeneratorsConfig(Section):
    """The pool of generator processes."""

    count: Annotated[int, Meta(ge=0, description="processes")]
    cores: Annotated[list[int], Meta(description="CPU cores each may use, by number, dealt out in turn; empty = all")]
    cores_each: Annotated[int, Meta(ge=0, description="cores per process taken from `cores`; 0 = each may use all of them")]
    gpus_each: Annotated[float, Meta(ge=0, description="GPUs per process")]


class SandboxConfig(Section):
    """Limits on one program that the policy wrote, and how what it gives is compared."""

    timeout_s: Annotated[float, Meta(gt=0, description="CPU seconds per test")]
    memory_mb: Annotated[int, Meta(ge=16, description="MB of address space above the interpreter's own")]
    output_kb: Annotated[int, Meta(ge=1, description="KB of output per test")]
    stop_at_first_failure: Annotated[bool, Meta(description="leave the tests after the first failed one unrun")]
    allow_unsafe: Annotated[bool, Meta(description="run even where neither namespaces nor seccomp work")]
    packages: Annotated[
        list[str], Meta(description="installed packages that programs may import beyond the standard library, by import name")
    ]
    float_tolerance: Annotated[float, Meta(ge=0, lt=1, description="relative difference at which two floats still count as equal")]
    checker: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None,
        Meta(description="module:function(input, got, expected) -> bool that decides stdin and call tests; null = the built-in comparison"),
    ]


class VerifiersConfig(Section):
    """The pool of verifier processes and how they are called."""

    count: Annotated[int, Meta(ge=1, description="processes")]
    cells: Annotated[int, Meta(ge=1, description="programs run side by side per process")]
    cores: Annotated[list[int], Meta(description="CPU cores they may use; empty = all")]
    queue_size: Annotated[int, Meta(ge=1, description="programs that wait per process before it answers 429")]
    timeout_s: Annotated[float, Meta(gt=0, description="longest time one scoring call may take, its wait included")]
    max_attempts: Annotated[int, Meta(ge=1, description="calls per program before the sample fails")]
    memo_programs: Annotated[int, Meta(ge=0, description="programs whose verdicts a generator remembers; 0 = judge every sample anew")]


class RewardConfig(Section):
    """From verdicts to a task reward."""

    mode: Annotated[Literal["all_or_nothing", "fraction"], Meta(description="1 if all tests pass, or the fraction that passes")]
    pass_reward: Annotated[float, Meta(description="reward of a program that passes all tests")]
    fail_reward: Annotated[float, Meta(description="reward of one that passes none")]
    extraction: Annotated[
        Literal["auto", "fenced", "whole"],
        Meta(description="the last fenced block that parses, the whole response, or fenced if there is one"),
    ]
    scale: Annotated[float, Meta(description="factor on (reward - bias)")]
    bias: Annotated[float, Meta(description="taken off the reward first")]
    clip: Annotated[float, Meta(gt=0, description="bound on the absolute scaled reward")]
    placement: Annotated[
        Literal["end", "steps", "step_deltas"],
        Meta(description="one reward at the last token, or one per complete code block: its score, or what the score changed"),
    ]
    overlong_tokens: Annotated[int, Meta(ge=0, description="tokens below data.max_response_tokens over which a penalty rises; 0 = none")]
    overlong_penalty: Annotated[float, Meta(ge=0, description="reward taken off an answer of data.max_response_tokens, after scaling")]


class BufferConfig(Section):
    """Admission, age and storage."""

    groups_per_step: Annotated[int, Meta(ge=1, description="groups of one learner step")]
    max_staleness_versions: Annotated[int, Meta(ge=0, description="learner version minus oldest trained token's version; 0 = synchronous")]
    over_age: Annotated[Literal["drop", "mask"], Meta(description="drop over-age groups, or mask their over-age tokens")]
    durability: Annotated[
        Literal["normal", "full"], Meta(description="SQLite synchronous level: survives a process's death, or the machine's too")
    ]
    lease_timeout_s: Annotated[float, Meta(gt=0, description="a generator unheard of for so long loses its tickets")]


class WeightsConfig(Section):
    """How new weights reach the generators."""

    push_every_steps: Annotated[int, Meta(ge=1, description="learner steps between pushes")]
    deadline_s: Annotated[float, Meta(gt=0, description="a generator that has not loaded a push by then leaves the fleet")]
    probe_every_pushes: Annotated[int, Meta(ge=0, description="pushes between log-prob probes; 0 = only before the first step")]
    probe_tolerance: Annotated[float, Meta(gt=0, description="nats by which learner and generator may differ on a probe token")]


class EvaluationConfig(Section):
    """Held-out evaluation through the generators."""

    every_steps: Annotated[int, Meta(ge=0, description="learner steps between evaluations; 0 = never")]
    num_prompts: Annotated[int, Meta(ge=0, description="held-out prompts per evaluation, the first so many; 0 = all")]
    num_samples: Annotated[int, Meta(ge=1, description="samples per held-out prompt; more than one gives pass@k and needs a temperature")]
    temperature: Annotated[float, Meta(ge=0, description="0 = greedy")]


class CheckpointConfig(Section):
    """When the learner saves."""

    every_steps: Annotated[int, Meta(ge=0, description="learner steps between checkpoints; 0 = not by steps; one is written at the end")]
    every_minutes: Annotated[float, Meta(ge=0, description="minutes after which the next step is saved, whatever its number; 0 = never")]
    keep: Annotated[int, Meta(ge=1, description="checkpoints kept, the newest")]
    mirror: Annotated[str | None, Meta(description="fsspec URL of a directory that gets a copy of each checkpoint kept; null = none")]
    keep_best: Annotated[int, Meta(ge=0, description="older checkpoints kept besides, those of the best held-out pass rate")]


class MonitoringConfig(Section):
    """What people see."""

    tensorboard: Annotated[bool, Meta(description="start TensorBoard with the run")]
    tensorboard_port: Annotated[int, Meta(ge=0, le=65535, description="0 = a free one")]
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="port of the endpoint for Prometheus; 0 = a free one, null = none")
    ]
    live_line: Annotated[bool, Meta(description="one line of progress in the terminal")]


class NetworkConfig(Section):
    """Where sockets bind."""

    host: Annotated[str, Meta(min_length=1, description="address to bind and to announce; loopback unless told otherwise")]
    control_port: Annotated[int, Meta(ge=0, le=65535, description="port of the supervisor's control socket; 0 = a free one")]
    call_timeout_s: Annotated[float, Meta(gt=0, description="deadline of an ordinary remote call")]


class SupervisorConfig(Section):
    """Restarts, heartbeats and the end of a run."""

    heartbeat_s: Annotated[float, Meta(gt=0, description="seconds between heartbeats")]
    heartbeat_timeout_s: Annotated[float, Meta(gt=0, description="a process unheard of for so long is ended and started again")]
    start_timeout_s: Annotated[float, Meta(gt=0, description="longest start of a process")]
    stop_timeout_s: Annotated[float, Meta(gt=0, description="time to finish the step and save after a stop, before processes are killed")]
    max_restarts: Annotated[int, Meta(ge=0, description="restarts of one process within restart_window_s before the run fails")]
    restart_window_s: Annotated[float, Meta(gt=0, description="window of max_restarts")]
    stall_warning_s: Annotated[float, Meta(gt=0, description="time without a learner step after which status, log and TensorBoard say why")]
    stall_timeout_s: Annotated[float, Meta(gt=0, description="time without a learner step after which the run fails with that reason")]


class RunConfig(Section):
    """One run, completely."""

    run_name: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="directory name under output_dir; null = a readable unique one")
    ]
    output_dir: Annotated[str, Meta(min_length=1, description="where runs are kept")]
    cache_dir: Annotated[str | None, Meta(description="where the embedded model is kept; null = ~/.cache/async_rl")]
    num_steps: Annotated[int, Meta(ge=1, description="learner steps")]
    seed: Annotated[int, Meta(ge=0, description="seed of order, sampling and initialisation")]
    launcher: Annotated[Literal["local"], Meta(description="where processes run")]
    data: DataConfig
    model: ModelConfig
    generation: GenerationConfig
    generators: GeneratorsConfig
    verifiers: VerifiersConfig
    sandbox: SandboxConfig
    reward: RewardConfig
    buffer: BufferConfig
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    weights: WeightsConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    monitoring: MonitoringConfig
    network: NetworkConfig
    supervisor: SupervisorConfig
