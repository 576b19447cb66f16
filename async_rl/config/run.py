"""The schema of a run's configuration: every setting with its unit, its range and its meaning.

Invariants
- The schema has no defaults: all are in `conf/`.  Missing and unknown fields are errors.
- Every field states its unit in its name or description; ranges are checked when the configuration
  is decoded.
- Checks of several fields together are in `checks/`; composition from files and overrides is in
  `async_rl/composition/compose.py`.
Every process reads it from `<run>/config.yaml`, which is written once.
"""

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.base import (
    Entries,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Tag,
    Text,
)
from async_rl.config.data import DataConfig
from async_rl.config.generation import (
    Agent,
    GenerationConfig,
    GeneratorsConfig,
    ModelConfig,
    RolloutConfig,
)
from async_rl.config.launchers import ClusterLaunch, Launch
from async_rl.config.learner import LearnerConfig
from async_rl.config.rewards import RewardConfig, SandboxConfig, VerifiersConfig
from async_rl.config.timeouts import TimeoutsConfig

_Port = Annotated[int, Field(ge=0, le=65535)]
PIECE_BYTES = 256 << 20
"""A broadcast over NCCL sends pieces of at most this size, two of them under way."""
MOST_CHANGED = 0.375
"""Changed words are sent up to this share of all: with 4 bytes each, 0.75 of all bytes."""
COLOCATED = "colocated"
"""The value of placement with which generators and learner take turns."""
KEPT_GROUPS = 1_000_000
"""The newest trained groups that keep their rows in the ledger, 700 bytes each. Older ones become
sums per step, unless data.filter is set, which reads the rewards of every group.
"""


class BufferConfig(Section):
    """Admission, age and storage."""

    groups_per_step: PositiveInt
    """new groups of one learner step"""
    uses_per_group: PositiveInt
    """consecutive learner steps that train a group, as long as it is within
    max_staleness_versions"""
    max_staleness_versions: NonNegativeInt
    """largest learner version minus version of a sample's oldest trained token; 0 = synchronous"""
    uniform_groups: Literal["train", "replace"]
    """groups whose samples all have the same reward: train them, or drop them and sample others
    (dynamic sampling of DAPO)"""
    age_rule: Literal["drop", "mask", "exact"]
    """drop = drop groups with tokens above max_staleness_versions; mask = mask these tokens; exact
    = train every batch at exactly this age, for experiments"""


class MemoryTransfer(Section):
    """Memory that the generators map."""

    kind: Literal["shared_memory"]


class FileTransfer(Section):
    """Files of weights."""

    kind: Literal["filesystem"]
    path: str | None
    """fsspec URL of the directory of weight files; null = in the run's directory"""


class CollectiveTransfer(Section):
    """A broadcast: over NCCL if every rank has a whole GPU, else over gloo."""

    kind: Literal["collective"]


class AutoTransfer(Section):
    """The first medium that reaches a generator."""

    kind: Literal["auto"]
    path: str | None
    """fsspec URL of the directory of weight files; null = in the run's directory"""


Transfer = AutoTransfer | MemoryTransfer | FileTransfer | CollectiveTransfer


class WeightsConfig(Section):
    """Transfer of new weights to the generators."""

    transfer: Annotated[Transfer, Tag]
    """shared_memory reaches generators on the learner's machine, filesystem and collective (a
    broadcast) also other machines; auto = collective if every rank has a whole GPU, else
    shared_memory, or filesystem if that fails"""
    push_every_steps: PositiveInt
    """learner steps between pushes"""
    probe_every_pushes: NonNegativeInt
    """pushes between full log-prob probes, with one of 16 tokens in between; 0 = only at the first
    load of a generator"""


class EvaluationConfig(Section):
    """Held-out evaluation by the generators."""

    every_steps: NonNegativeInt
    """learner steps between evaluations; 0 = never, as for data.train_files without
    data.val_files"""
    num_prompts: NonNegativeInt
    """held-out prompts per evaluation, the first ones; 0 = all"""
    num_samples: PositiveInt
    """samples per held-out prompt; more than one adds pass@k, maj@k and one greedy answer, and
    needs temperature > 0"""
    temperature: NonNegativeFloat
    """sampling temperature; 0 = greedy"""
    sampling: Entries
    """name=value pairs as generation.sampling, for evaluation, without the bound of top_k"""


class CheckpointConfig(Section):
    """Intervals, number and copies of the checkpoints."""

    every_steps: NonNegativeInt
    """learner steps between checkpoints; 0 = no checkpoints by steps; the last step is always
    saved"""
    # In addition to steps: the work that a crash costs is a matter of time.
    every_minutes: NonNegativeFloat
    """minutes since the last checkpoint after which the next step is saved; 0 = never"""
    keep: PositiveInt
    """newest checkpoints to keep"""
    mirror: LocalPath | None
    """fsspec URL of a directory that receives a copy of each kept checkpoint and of the ledger;
    null = none"""
    keep_best: NonNegativeInt
    """older checkpoints to keep in addition, those with the best held-out pass rate"""


class MonitoringConfig(Section):
    """Displays and exports of the run's metrics."""

    tensorboard_port: _Port | None
    """port of the TensorBoard that starts with the run; 0 = a free one, null = none"""
    prometheus_port: _Port | None
    """port of the endpoint for Prometheus; 0 = a free one, null = none"""
    wandb: Text | None
    """project in Weights & Biases that also receives the metrics; null = none"""


class NetworkConfig(Section):
    """Addresses of the sockets."""

    # Loopback where that is enough, so that a run on one machine opens no port to the network.
    host: Text
    """the supervisor's address, or the name of a network interface that every node uses; auto =
    loopback with launcher=local, else the node's address"""


class SupervisorConfig(Section):
    """Restarts of processes."""

    max_restarts: NonNegativeInt
    """restarts of one process within 5 minutes, or 2 timeouts.start_s if longer; the run fails at
    the next one"""


class RunConfig(Section):
    """The complete configuration of one run."""

    # It is also the name of the copy in checkpoint.mirror, and a word of commands in messages.
    run_name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")] | None
    """name of the directory under output_dir: letters, digits, dots, dashes and underscores, at
    most 200; null = a generated unique name"""
    output_dir: LocalPath
    """directory of all runs"""
    num_steps: PositiveInt
    """learner steps; null at launch = computed from data.epochs"""
    seed: NonNegativeInt
    """seed of data order, sampling and initialization"""
    launcher: Annotated[Launch, Tag]
    """processes run on this machine, in a Ray cluster, or in a Slurm job"""
    recording: Literal["off", "times", "full"]
    """for explain, plan and replay: times = the moments of each sample, and the trajectories of the
    newest two steps; full = all trajectories, until the disk is short; off = neither"""
    placement: Literal["disaggregated", "colocated"]
    """generators and learner use separate devices, or share one in turns"""
    # The order of the sections is the order of docs/configuration.md.
    data: DataConfig
    model: ModelConfig
    generation: GenerationConfig
    generators: GeneratorsConfig
    verifiers: VerifiersConfig
    sandbox: SandboxConfig
    rollout: RolloutConfig
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
    timeouts: TimeoutsConfig

    @property
    def takes_turns(self) -> bool:
        """Whether generators and learner use the same devices in turns: the engines sleep while the
        learner steps, and start with the first push. Otherwise both compute at the same time, each
        on its own devices or its own part of one device.
        """
        return self.placement == COLOCATED

    def is_evaluated(self, version: int) -> bool:
        """Return whether this version is evaluated: version 0, every n-th and the last."""
        every = self.evaluation.every_steps
        return every > 0 and (version % every == 0 or version == self.num_steps)

    @property
    def node_ranks(self) -> int:
        """The most learner ranks of a node; 0 on one machine, or if they are not known."""
        if isinstance(self.launcher, ClusterLaunch):
            return self.launcher.gpus_per_node
        return 0

    @property
    def agent(self) -> Agent:
        """The agent that makes the samples, if `rollout.fn` names one."""
        return self.rollout.agent
