"""Settings of a run's life: buffer, weight pushes, evaluation, checkpoints, monitoring, network,
supervision.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class BufferConfig(Section):
    """Admission, age and storage."""

    groups_per_step: Annotated[int, Meta(ge=1, description="groups of one learner step")]
    max_staleness_versions: Annotated[
        int,
        Meta(
            ge=0,
            description="learner version minus oldest trained token's version; 0 = synchronous",
        ),
    ]
    over_age: Annotated[
        Literal["drop", "mask"],
        Meta(description="drop over-age groups, or mask their over-age tokens"),
    ]
    durability: Annotated[
        Literal["normal", "full"],
        Meta(
            description="SQLite synchronous level: survives a process's death, or the machine's too"
        ),
    ]
    keep_steps: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "newest steps whose trajectories stay stored for async-rl rollouts, though no"
                " checkpoint needs them"
            ),
        ),
    ]


class WeightsConfig(Section):
    """How new weights reach the generators."""

    transfer: Annotated[
        Literal["auto", "shared_memory", "filesystem", "collective", "ipc"],
        Meta(
            description=(
                "shared memory reaches generators on the learner's machine, a file or a collective"
                " (a broadcast) those elsewhere, ipc a vLLM generator on the learner's GPU"
                " (placement=colocated); auto: collective between GPUs of their own, else shared"
                " memory and where that fails a file"
            )
        ),
    ]
    backend: Annotated[
        Literal["auto", "gloo", "nccl"],
        Meta(
            description=(
                "of a collective; auto = nccl where every rank has a GPU of its own, else gloo"
            )
        ),
    ]
    bucket_mb: Annotated[
        int,
        Meta(ge=1, description="MB of the buffer of a collective; a larger tensor makes it larger"),
    ]
    path: Annotated[
        str | None,
        Meta(
            description=(
                "fsspec URL of the directory for files of weights; null = in the run's directory"
            )
        ),
    ]
    push_every_steps: Annotated[int, Meta(ge=1, description="learner steps between pushes")]
    probe_every_pushes: Annotated[
        int,
        Meta(ge=0, description="pushes between log-prob probes; 0 = only before the first step"),
    ]
    probe_tolerance: Annotated[
        float,
        Meta(gt=0, description="nats by which learner and generator may differ on a probe token"),
    ]


class EvaluationConfig(Section):
    """Held-out evaluation through the generators."""

    every_steps: Annotated[
        int, Meta(ge=0, description="learner steps between evaluations; 0 = never")
    ]
    num_prompts: Annotated[
        int, Meta(ge=0, description="held-out prompts per evaluation, the first so many; 0 = all")
    ]
    num_samples: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "samples per held-out prompt; more than one gives pass@k and maj@k, and needs a"
                " temperature"
            ),
        ),
    ]
    temperature: Annotated[float, Meta(ge=0, description="0 = greedy")]
    greedy: Annotated[
        bool,
        Meta(
            description=(
                "besides the samples one greedy answer per held-out prompt: eval/greedy_pass"
            )
        ),
    ]


class CheckpointConfig(Section):
    """When the learner saves."""

    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "learner steps between checkpoints; 0 = not by steps; one is written at the end"
            ),
        ),
    ]
    every_minutes: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "minutes after which the next step is saved, whatever its number; 0 = never"
            ),
        ),
    ]
    keep: Annotated[int, Meta(ge=1, description="checkpoints kept, the newest")]
    mirror: Annotated[
        str | None,
        Meta(
            description=(
                "fsspec URL of a directory that gets a copy of each checkpoint kept and of the"
                " ledger; null = none"
            )
        ),
    ]
    keep_best: Annotated[
        int,
        Meta(
            ge=0, description="older checkpoints kept besides, those of the best held-out pass rate"
        ),
    ]


class MonitoringConfig(Section):
    """What people see."""

    tensorboard: Annotated[bool, Meta(description="start TensorBoard with the run")]
    tensorboard_port: Annotated[int, Meta(ge=0, le=65535, description="0 = a free one")]
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="port of the endpoint for Prometheus; 0 = a free one, null = none"),
    ]
    wandb: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="project in Weights & Biases that gets the numbers too; null = none"),
    ]
    live_line: Annotated[bool, Meta(description="one line of progress in the terminal")]


class NetworkConfig(Section):
    """Where sockets bind."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "the supervisor's address; auto = loopback with launcher=local, else the node's own"
            ),
        ),
    ]
    interface: Annotated[
        str | None,
        Meta(
            description="network interface that every node uses; null = the way to the supervisor"
        ),
    ]
    control_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port of the supervisor's control socket; 0 = a free one"),
    ]


class SupervisorConfig(Section):
    """Restarts of processes."""

    max_restarts: Annotated[
        int,
        Meta(ge=0, description="restarts of one process within five minutes before the run fails"),
    ]
