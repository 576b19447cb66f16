"""What a process spec becomes where the cluster, not this machine, says on which cores and GPUs it
runs.

Used by both launchers of clusters, and by `--dry-run` to show it. Pure.
"""

from __future__ import annotations

import dataclasses

from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.planning.topology import ProcessSpec


def cluster_cpus(config: RunConfig, spec: ProcessSpec) -> int:
    """CPUs that the process takes of its node."""
    match spec.role:
        case "buffer":
            return config.cluster.buffer_cpus
        case "verifier":
            return config.cluster.verifier_cpus
        case "generator":
            return config_of(config, pool_of(spec.name)).cluster.generator_cpus
        case _:
            return config.cluster.learner_cpus


def needs(config: RunConfig, spec: ProcessSpec) -> str:
    """What a process that waits for its place waits for, in words."""
    is_bound = spec.role == "generator" and config.launcher == "ray"
    resource = config_of(config, pool_of(spec.name)).ray.generator_resource if is_bound else None
    gpus = f", {spec.gpus:g} GPU" if spec.gpus else ""
    return f"room on the cluster: {cluster_cpus(config, spec)} CPU{gpus}" + (
        f", {resource} 1" if resource is not None else ""
    )


def on_cluster(config: RunConfig, spec: ProcessSpec) -> ProcessSpec:
    """The spec without cores and GPUs of this machine: Ray and Slurm set what a process may use;
    threads follow from its CPUs.
    """
    is_heavy = spec.role in ("generator", "learner")
    env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    if spec.gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = (
            ""  # neither hides those of the node from a process that asked for none
        )
    env["OMP_NUM_THREADS"] = str(cluster_cpus(config, spec) if is_heavy else 1)
    return dataclasses.replace(spec, cores=(), env=env)
