"""What a process takes of a Ray cluster, and which places are kept for it. Pure: knows Ray's
options, imports nothing of it.

Invariant: buffer and learner have placement groups of their own, which stay theirs from one life to
the next; no other process has. Used by ray_launcher.py.
"""

from __future__ import annotations

from typing import Any

from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.launchers.backends.cluster import cluster_cpus
from async_rl.planning.topology import ProcessSpec


def actor_options(config: RunConfig, spec: ProcessSpec, *, is_own_cluster: bool) -> dict[str, Any]:
    """What a process takes of its node, and how nodes are chosen. A cluster of the run's own has to
    do, however many CPUs it has.
    """
    resource = (
        config_of(config, pool_of(spec.name)).ray.generator_resource
        if spec.role == "generator"
        else None
    )
    return {
        "num_cpus": 0 if is_own_cluster else cluster_cpus(config, spec),
        "num_gpus": spec.gpus,
        "resources": {resource: 1} if resource is not None else {},
        "scheduling_strategy": "SPREAD" if config.ray.generators == "spread" else "DEFAULT",
    }


def learner_bundles(
    config: RunConfig, *, supervisor_host: str, is_own_cluster: bool
) -> list[dict[str, float]]:
    """What each rank of the learner takes, on the supervisor's node unless the run's directory is
    on all; empty if it takes nothing.

    With placement=colocated the first has room for the generators too: shares of a GPU in one
    bundle are of the same GPU.
    """
    cpus, generator_cpus = (
        (0, 0) if is_own_cluster else (config.cluster.learner_cpus, config.cluster.generator_cpus)
    )
    bundle = {"CPU": float(cpus), "GPU": config.learner.gpus_each}
    if not config.cluster.shared_run_dir and not is_own_cluster:
        bundle[f"node:{supervisor_host}"] = 0.001  # every node offers 1 of its address
    bundles = [dict(bundle) for _ in range(config.learner.ranks)]
    if config.placement == "colocated":
        bundles[0]["CPU"] += config.generators.count * generator_cpus
        bundles[0]["GPU"] += config.generators.count * config.generators.gpus_each
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return bundles if all(bundles) else []


def buffer_bundles(
    config: RunConfig, *, supervisor_host: str, is_own_cluster: bool
) -> list[dict[str, float]]:
    """What the buffer takes, always on the supervisor's node; in a cluster of the run's own nothing
    is counted.
    """
    return (
        []
        if is_own_cluster
        else [{"CPU": float(config.cluster.buffer_cpus), f"node:{supervisor_host}": 0.001}]
    )
