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

from msgspec import Meta

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

    run_name: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="directory name under output_dir; null = a readable unique one"),
    ]
    output_dir: Annotated[str, Meta(min_length=1, description="where runs are kept")]
    cache_dir: Annotated[
        str | None, Meta(description="where the embedded model is kept; null = ~/.cache/async_rl")
    ]
    num_steps: Annotated[
        int, Meta(ge=1, description="learner steps; null at launch = those of data.epochs")
    ]
    seed: Annotated[int, Meta(ge=0, description="seed of order, sampling and initialisation")]
    launcher: Annotated[Literal["local", "ray", "slurm"], Meta(description="where processes run")]
    placement: Annotated[
        Literal["disaggregated", "colocated"],
        Meta(
            description=(
                "generators and learner on devices of their own, or on the same one, taking turns"
            )
        ),
    ]
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
