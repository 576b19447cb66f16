"""A process spec on a cluster, where Ray or Slurm assigns cores and GPUs instead of this machine.

Both cluster launchers and `--dry-run` use it. Pure.
"""

from __future__ import annotations

import dataclasses

from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.planning.topology import ProcessSpec


def cluster_cpus(config: RunConfig, spec: ProcessSpec) -> int:
    """Return the number of CPUs that the process uses on its node."""
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
    """Describe the resources that a process without a node waits for."""
    text = f"room on the cluster: {cluster_cpus(config, spec)} CPU"
    if spec.gpus:
        text += f", {spec.gpus:g} GPU"
    if spec.role == "generator" and config.launcher == "ray":
        resource = config_of(config, pool_of(spec.name)).ray.generator_resource
        if resource is not None:
            text += f", {resource} 1"
    return text


def on_cluster(config: RunConfig, spec: ProcessSpec) -> ProcessSpec:
    """Return the spec without cores and GPUs of this machine; its threads follow from its CPUs."""
    env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    if spec.gpus == 0:
        # Neither Ray nor Slurm hides the node's GPUs from a process that asked for none.
        env["CUDA_VISIBLE_DEVICES"] = ""
    # Buffer and verifier do no tensor work; more threads would only compete.
    is_heavy = spec.role in ("generator", "learner")
    env["OMP_NUM_THREADS"] = str(cluster_cpus(config, spec)) if is_heavy else "1"
    return dataclasses.replace(spec, cores=(), env=env)
