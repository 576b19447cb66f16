"""The schema of a run's configuration: every setting with its unit, its range and its meaning.

Invariants
- No default lives here: `conf/` holds them all.  A missing field is an error, an unknown one too.
- Fields say their unit in the name or in the description; ranges are checked when the configuration
  is decoded.
- Checks that join several fields are in `config_check.py`; composition from files and overrides is
  in `launchers/configuration/compose.py`.
Read by every process from `<run>/config.yaml`, which is written once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.base import Section
from async_rl.config.cluster import ClusterConfig, RayConfig, SlurmConfig
from async_rl.config.data import DataConfig
from async_rl.config.generation import GenerationConfig, GeneratorsConfig, ModelConfig
from async_rl.config.learner import LearnerConfig
from async_rl.config.rewards import RewardConfig, SandboxConfig, VerifiersConfig
from async_rl.config.rollout import RolloutConfig
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
    """One run, completely."""

    run_name: Annotated[str, Field(min_length=1)] | None
    """directory name under output_dir; null = a readable unique one"""
    output_dir: Annotated[str, Field(min_length=1)]
    """where runs are kept"""
    cache_dir: str | None
    """where the embedded model is kept; null = ~/.cache/async_rl"""
    num_steps: Annotated[int, Field(ge=1)]
    """learner steps; null at launch = those of data.epochs"""
    seed: Annotated[int, Field(ge=0)]
    """seed of order, sampling and initialisation"""
    launcher: Literal["local", "ray", "slurm"]
    """where processes run"""
    placement: Literal["disaggregated", "colocated"]
    """generators and learner on devices of their own, or on the same one, taking turns"""
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
    cluster: ClusterConfig
    ray: RayConfig
    slurm: SlurmConfig
    supervisor: SupervisorConfig
    timeouts: TimeoutsConfig
