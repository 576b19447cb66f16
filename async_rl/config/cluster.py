"""Settings of runs on more than one machine: what each kind of process takes of a node, and how Ray
and Slurm are asked for it.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class ClusterConfig(Section):
    """What launcher=ray and launcher=slurm have in common; GPUs per process are
    generators.gpus_each and learner.gpus_each.
    """

    nodes: Annotated[int, Field(ge=1)]
    """machines; sizes hardware=cluster and the job of launcher=slurm"""
    gpus_per_node: Annotated[int, Field(ge=0)]
    """GPUs of one machine; sizes hardware=cluster and the job of launcher=slurm"""
    buffer_cpus: Annotated[int, Field(ge=1)]
    """CPUs taken by the buffer"""
    verifier_cpus: Annotated[int, Field(ge=1)]
    """CPUs taken by each verifier"""
    generator_cpus: Annotated[int, Field(ge=1)]
    """CPUs taken by each generator, and its threads"""
    learner_cpus: Annotated[int, Field(ge=1)]
    """CPUs taken by each learner rank, and its threads"""
    shared_run_dir: bool
    """output_dir is on a filesystem that all nodes share; false: buffer and learner stay beside the
    supervisor"""


class RayConfig(Section):
    """launcher=ray."""

    address: Annotated[str, Field(min_length=1)]
    """HOST:PORT of a cluster's head; auto = the one this machine belongs to; local = one of its
    own"""
    generators: Literal["spread", "pack"]
    """over as many nodes as there are, or on few"""
    learner: Literal["strict_pack", "pack", "spread", "strict_spread"]
    """the learner's ranks: strategy of their placement group"""
    generator_resource: str | None
    """custom resource of which each generator takes 1 (ray start --resources); null = any node will
    do"""


class SlurmConfig(Section):
    """launcher=slurm."""

    partition: str | None
    """sbatch --partition; null = the cluster's default"""
    account: str | None
    """sbatch --account; null = yours"""
    time: Annotated[str, Field(pattern="^(\\d+|\\d+:\\d+(:\\d+)?|\\d+-\\d+(:\\d+){0,2})$")]
    """time limit: minutes, HH:MM:SS or days-HH:MM:SS"""
    cpus_per_node: Annotated[int, Field(ge=0)]
    """CPUs of each node; 0 = whole nodes, shared with nobody"""
    extra: list[str]
    """further options of sbatch, as in --constraint=a100"""
