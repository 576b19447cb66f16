"""Settings of a run's life: buffer, weight pushes, evaluation, checkpoints, monitoring, network,
supervision.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class BufferConfig(Section):
    """Admission, age and storage."""

    groups_per_step: Annotated[int, Field(ge=1)]
    """groups of one learner step"""
    max_staleness_versions: Annotated[int, Field(ge=0)]
    """learner version minus oldest trained token's version; 0 = synchronous"""
    over_age: Literal["drop", "mask"]
    """drop over-age groups, or mask their over-age tokens"""
    durability: Literal["normal", "full"]
    """SQLite synchronous level: survives a process's death, or the machine's too"""
    keep_steps: Annotated[int, Field(ge=0)]
    """newest steps whose trajectories stay stored for async-rl rollouts, though no checkpoint needs
    them"""


class WeightsConfig(Section):
    """How new weights reach the generators."""

    transfer: Literal["auto", "shared_memory", "filesystem", "collective", "ipc"]
    """shared memory reaches generators on the learner's machine, a file or a collective (a
    broadcast) those elsewhere, ipc a vLLM generator on the learner's GPU (placement=colocated);
    auto: collective between GPUs of their own, else shared memory and where that fails a file"""
    backend: Literal["auto", "gloo", "nccl"]
    """of a collective; auto = nccl where every rank has a GPU of its own, else gloo"""
    bucket_mb: Annotated[int, Field(ge=1)]
    """MB of the buffer of a collective; a larger tensor makes it larger"""
    path: str | None
    """fsspec URL of the directory for files of weights; null = in the run's directory"""
    push_every_steps: Annotated[int, Field(ge=1)]
    """learner steps between pushes"""
    probe_every_pushes: Annotated[int, Field(ge=0)]
    """pushes between log-prob probes; 0 = only before the first step"""
    probe_tolerance: Annotated[float, Field(gt=0)]
    """nats by which learner and generator may differ on a probe token"""


class EvaluationConfig(Section):
    """Held-out evaluation through the generators."""

    every_steps: Annotated[int, Field(ge=0)]
    """learner steps between evaluations; 0 = never"""
    num_prompts: Annotated[int, Field(ge=0)]
    """held-out prompts per evaluation, the first so many; 0 = all"""
    num_samples: Annotated[int, Field(ge=1)]
    """samples per held-out prompt; more than one gives pass@k and maj@k, and needs a temperature"""
    temperature: Annotated[float, Field(ge=0)]
    """0 = greedy"""
    greedy: bool
    """besides the samples one greedy answer per held-out prompt: eval/greedy_pass"""


class CheckpointConfig(Section):
    """When the learner saves."""

    every_steps: Annotated[int, Field(ge=0)]
    """learner steps between checkpoints; 0 = not by steps; one is written at the end"""
    every_minutes: Annotated[float, Field(ge=0)]
    """minutes after which the next step is saved, whatever its number; 0 = never"""
    keep: Annotated[int, Field(ge=1)]
    """checkpoints kept, the newest"""
    mirror: str | None
    """fsspec URL of a directory that gets a copy of each checkpoint kept and of the ledger; null =
    none"""
    keep_best: Annotated[int, Field(ge=0)]
    """older checkpoints kept besides, those of the best held-out pass rate"""


class MonitoringConfig(Section):
    """What people see."""

    tensorboard: bool
    """start TensorBoard with the run"""
    tensorboard_port: Annotated[int, Field(ge=0, le=65535)]
    """0 = a free one"""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None
    """port of the endpoint for Prometheus; 0 = a free one, null = none"""
    wandb: Annotated[str, Field(min_length=1)] | None
    """project in Weights & Biases that gets the numbers too; null = none"""
    live_line: bool
    """one line of progress in the terminal"""


class NetworkConfig(Section):
    """Where sockets bind."""

    host: Annotated[str, Field(min_length=1)]
    """the supervisor's address; auto = loopback with launcher=local, else the node's own"""
    interface: str | None
    """network interface that every node uses; null = the way to the supervisor"""
    control_port: Annotated[int, Field(ge=0, le=65535)]
    """port of the supervisor's control socket; 0 = a free one"""


class SupervisorConfig(Section):
    """Restarts of processes."""

    max_restarts: Annotated[int, Field(ge=0)]
    """restarts of one process within five minutes before the run fails"""
