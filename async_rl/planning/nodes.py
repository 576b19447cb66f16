"""The nodes of a cluster as one machine, for the plan of a run and its checks. Pure."""

from __future__ import annotations

import dataclasses

from async_rl.config.launchers import ClusterLaunch
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine


def fleet(config: RunConfig, machine: Machine) -> Machine | None:
    """Return all GPUs and the main memory of a run as one machine; None if they are not known.

    machine: of a local run, or a node of the cluster. One without GPUs (a login node) says nothing
    about the nodes.
    """
    launch = config.launcher
    if not isinstance(launch, ClusterLaunch):
        return machine
    num_gpus = launch.nodes * launch.gpus_per_node
    if not num_gpus or not machine.num_gpus or not machine.gpu_mb:
        return None
    memory_mb = launch.nodes * machine.memory_mb
    return dataclasses.replace(machine, nodes=launch.nodes, num_gpus=num_gpus, memory_mb=memory_mb)


def rank_counts(config: RunConfig, whole: Machine, most: int) -> list[int]:
    """Return the numbers of learner ranks to consider, from the configured one to `most`: every
    number on one node, then whole nodes. Each rank has work: a group of each minibatch.
    """
    learner = config.learner
    node = whole.num_gpus // whole.nodes
    groups = config.buffer.groups_per_step // learner.minibatches
    most = min(most, groups * learner.context_ranks)
    if not config.launcher.has_shared_run_dir:
        most = min(most, node)  # the supervisor's node has the checkpoints
    counts = range(learner.ranks, max(learner.ranks, most) + 1)
    return [n for n in counts if n % learner.context_ranks == 0 and (n <= node or n % node == 0)]
