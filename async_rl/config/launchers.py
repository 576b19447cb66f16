"""Settings of the launcher: where the processes run, and the options of Ray and Slurm.

Part of the schema in `run.py`, whose invariants hold here.
"""

import re
from typing import Annotated, ClassVar, Literal

from async_rl.config.base import NonNegativeInt, OneOrMore, PositiveInt, Section, Text


class LaunchConfig(Section):
    """What a launcher can do. The product asks this and never which launcher it is."""

    # Every process runs on the supervisor's machine: its cores, memory and GPUs can be read there
    # and are assigned by the supervisor. Otherwise the cluster assigns them, on nodes that differ.
    is_one_machine: ClassVar = False
    # The supervisor runs in a job, on a node that is not known before.
    is_submitted: ClassVar = False

    @property
    def uses_one_node(self) -> bool:
        """Return whether every process runs on the same node, so that loopback reaches it."""
        return self.is_one_machine

    @property
    def cpus_per_node(self) -> int:
        """The CPUs of each node; 0 if a process may have all CPUs of its node."""
        return 0


class LocalLaunch(LaunchConfig):
    """Processes of this machine."""

    kind: Literal["local"]
    is_one_machine: ClassVar = True


class ClusterLaunch(LaunchConfig):
    """Processes on several machines; GPUs per process are set by generators.gpus_each and
    learner.gpus_each.
    """

    nodes: PositiveInt
    """number of machines"""
    gpus_per_node: NonNegativeInt
    """GPUs of one machine"""
    generator_cpus: PositiveInt
    """CPUs and threads of each generator; with GPUs at least 2 and one per GPU"""
    learner_cpus: PositiveInt
    """CPUs and threads of each learner rank; with a GPU at least 2"""
    node_kind: str | None
    """nodes of the generators: with ray a custom resource, 1 for each generator, with slurm a
    feature of the node (srun --constraint); null = any node"""


class RayLaunch(ClusterLaunch):
    """Actors of a Ray cluster, whose nodes share output_dir."""

    kind: Literal["ray"]
    address: Text
    """HOST:PORT of a cluster's head; auto = the cluster this machine belongs to; local = start a
    new one on this machine"""

    @property
    def uses_one_node(self) -> bool:
        """Return whether the run starts a cluster of its own on this machine."""
        return self.address == "local"


class SlurmLaunch(ClusterLaunch):
    """Steps of one Slurm job, whose nodes share output_dir."""

    kind: Literal["slurm"]
    is_submitted: ClassVar = True
    extra: Annotated[list[str], OneOrMore]
    """further options of sbatch, such as --partition=gpu or --time=12:00:00 (without it 24 hours);
    with --cpus-per-task=N each node gives N CPUs, otherwise nodes are exclusive"""

    @property
    def uses_one_node(self) -> bool:
        """Return whether the job has one node."""
        return self.nodes == 1

    @property
    def cpus_per_node(self) -> int:
        """The CPUs of each node that `extra` requests; 0 if the nodes are exclusive."""
        options = (re.fullmatch(r"(?:--cpus-per-task[= ]|-c ?)(\d+)", x) for x in self.extra)
        requested = [int(option[1]) for option in options if option]
        # sbatch uses the last value if an option is given twice.
        return requested[-1] if requested else 0


Launch = LocalLaunch | RayLaunch | SlurmLaunch
