"""A process spec on a cluster, where Ray or Slurm assigns cores and GPUs instead of this machine.

Both cluster launchers and `--dry-run` use it. Pure.
"""

from __future__ import annotations

import dataclasses
import math

from async_rl.config.launchers import ClusterLaunch
from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.planning.topology import ProcessSpec

BUFFER_CPUS = 1
"""The buffer is one event loop and one writer of SQLite, which wait for each other."""


def launch_of(config: RunConfig, spec: ProcessSpec) -> ClusterLaunch:
    """Return the settings of the cluster for this process; the settings of a pool replace the
    settings of the run.
    """
    launch = config_of(config, pool_of(spec.name)).launcher
    assert isinstance(launch, ClusterLaunch)
    return launch


def cluster_cpus(config: RunConfig, spec: ProcessSpec) -> int:
    """Return the number of CPUs that the process uses on its node; a verifier one per program.

    With GPUs an engine has a front, a core and a worker per GPU, all of them busy, and a learner
    rank a second thread for checkpoints and pushes.
    """
    match spec.role:
        case "buffer":
            return BUFFER_CPUS
        case "gateway":
            return 1 + config.agent.workers
        case "verifier":
            return config.verifiers.cells
        case "generator":
            least = 2 + math.ceil(spec.gpus) if spec.gpus else 1
            return max(least, launch_of(config, spec).generator_cpus)
        case _:
            least = 2 if spec.gpus else 1
            return max(least, launch_of(config, spec).learner_cpus)


def needs(config: RunConfig, spec: ProcessSpec) -> str:
    """Describe the resources that a process without a node waits for."""
    text = f"room on the cluster: {cluster_cpus(config, spec)} CPU"
    if spec.gpus:
        text += f", {spec.gpus:g} GPU"
    resource = launch_of(config, spec).node_kind
    if spec.role == "generator" and resource is not None:
        text += f", {resource} 1"
    return text


def on_cluster(config: RunConfig, spec: ProcessSpec) -> ProcessSpec:
    """Return the spec without cores and GPUs of this machine; its threads follow from its CPUs."""
    env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    if spec.gpus == 0:
        # Neither Ray nor Slurm hides the node's GPUs from a process that requested none.
        env["CUDA_VISIBLE_DEVICES"] = ""
    # Buffer and verifier do no tensor work; more threads would only compete.
    is_heavy = spec.role in ("generator", "learner")
    env["OMP_NUM_THREADS"] = str(cluster_cpus(config, spec)) if is_heavy else "1"
    return dataclasses.replace(spec, cores=(), env=env)
