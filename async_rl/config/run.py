"""The schema of a run's configuration: every setting with its unit, its range and its meaning.

Invariants
- The schema has no defaults: all are in `conf/`.  Missing and unknown fields are errors.
- Every field states its unit in its name or description; ranges are checked when the configuration
  is decoded.
- Checks of several fields together are in `checks/`; composition from files and overrides is in
  `async_rl/composition/compose.py`.
Every process reads it from `<run>/config.yaml`, which is written once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.base import LocalPath, NonNegativeInt, PositiveInt, Section, Tag, Text
from async_rl.config.data import DataConfig
from async_rl.config.generation import GenerationConfig, GeneratorsConfig, ModelConfig
from async_rl.config.launchers import Launch
from async_rl.config.learner import LearnerConfig
from async_rl.config.placement import PLACEMENTS, OwnDevices
from async_rl.config.rewards import RewardConfig, SandboxConfig, VerifiersConfig
from async_rl.config.rollout import Agent, RolloutConfig
from async_rl.config.running import (
    BufferConfig,
    CheckpointConfig,
    EvaluationConfig,
    MonitoringConfig,
    NetworkConfig,
    SupervisorConfig,
    WeightsConfig,
)
from async_rl.config.timeouts import TimeoutsConfig


class RunConfig(Section):
    """The complete configuration of one run."""

    run_name: Text | None
    """name of the directory under output_dir; null = a generated unique name"""
    output_dir: Annotated[LocalPath, Field(min_length=1)]
    """directory of all runs"""
    num_steps: PositiveInt
    """learner steps; null at launch = computed from data.epochs"""
    seed: NonNegativeInt
    """seed of data order, sampling and initialization"""
    launcher: Annotated[Launch, Tag]
    """processes run on this machine, in a Ray cluster, or in a Slurm job"""
    recording: Literal["off", "times", "full"]
    """for explain, plan and replay: times = the moments of each sample, and the trajectories of the
    newest two steps; full = the trajectories of all steps, without the oldest once less than 5 GB
    of the disk is free, or a tenth of a disk below 50 GB; off = neither"""
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
    def devices(self) -> OwnDevices:
        """The use of devices by generators and learner."""
        # By name here only: a tagged union would make `placement` a section of every file.
        return PLACEMENTS[self.placement]

    @property
    def agent(self) -> Agent:
        """The agent that makes the samples, if `rollout.fn` names one."""
        return self.rollout.agent
