"""A process spec on a cluster, where Ray or Slurm assigns cores and GPUs instead of this machine.

Both cluster launchers and `--dry-run` use it. Pure: knows the options of Ray but does not import
Ray. Invariant: the learner has a placement group, which stays reserved when a rank restarts; the
buffer needs none, because it reserves no CPU in Ray.
"""

import dataclasses
import math
from typing import Any

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


def kind_of_node(config: RunConfig, spec: ProcessSpec) -> str | None:
    """Return the kind of node that the process needs; only generators need one."""
    return launch_of(config, spec).node_kind if spec.role == "generator" else None


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
    if kind := kind_of_node(config, spec):
        text += f", {kind} 1"
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


Bundle = dict[str, float]


def actor_options(config: RunConfig, spec: ProcessSpec, *, is_own_cluster: bool) -> dict[str, Any]:
    """Return the resources of a process on its node, and how Ray chooses nodes.

    A cluster that the run started counts no CPUs, because it must work with any number of them. The
    buffer counts none: it may run on one node only, and must find room there when it restarts.
    """
    kind = kind_of_node(config, spec)
    return {
        "num_cpus": 0 if is_own_cluster or spec.role == "buffer" else cluster_cpus(config, spec),
        "num_gpus": spec.gpus,
        "resources": {kind: 1} if kind else {},
        # One node lost takes few generators with it.
        "scheduling_strategy": "SPREAD",
    }


def is_with_learner(config: RunConfig, spec: ProcessSpec) -> bool:
    """Return whether the process runs in the learner's placement group."""
    is_colocated = spec.role == "generator" and config.takes_turns
    return spec.role == "learner" or is_colocated


def group_strategy(config: RunConfig) -> str:
    """Return how Ray places the learner's ranks: on one node if they fit there, since they exchange
    gradients; else on as few as possible.
    """
    assert isinstance(config.launcher, ClusterLaunch)
    gpus = config.learner.ranks * config.learner.gpus_each
    if 0 < gpus <= config.launcher.gpus_per_node:
        return "STRICT_PACK"
    return "PACK"


def learner_bundles(config: RunConfig, *, is_own_cluster: bool) -> list[Bundle]:
    """Return the bundle of each learner rank; empty if a rank needs no resources.

    With placement=colocated the first bundle has room for the generators too: shares of a GPU in
    one bundle are of the same GPU.
    """
    cluster = config.launcher
    assert isinstance(cluster, ClusterLaunch)
    bundle: Bundle = {"CPU": float(cluster.learner_cpus), "GPU": config.learner.gpus_each}
    generator_cpus = cluster.generator_cpus
    if is_own_cluster:
        bundle["CPU"] = generator_cpus = 0
    bundles = [dict(bundle) for _ in range(config.learner.ranks)]
    if config.takes_turns:
        count = config.generators.count
        bundles[0]["CPU"] += count * generator_cpus
        bundles[0]["GPU"] += count * config.generators.gpus_each
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    # Ray refuses a bundle without resources.
    return bundles if all(bundles) else []
