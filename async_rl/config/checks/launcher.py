"""Checks of runs on more than one machine: launcher=ray and launcher=slurm.

Part of `checks/run.py`, whose invariants hold here.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.launchers import ClusterLaunch, RayLaunch, SlurmLaunch
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the chosen launcher."""
    match config.launcher:
        case RayLaunch() as ray:
            yield from _address(config, is_one_machine=ray.address == "local")
            yield from _ranks_of_ray(config, ray)
        case SlurmLaunch() as slurm:
            yield from _address(config, is_one_machine=slurm.nodes == 1)
            yield from step_problems(config, "learner.gpus_each", config.learner.gpus_each)
            yield from _cpus_of_slurm(config, slurm)


def _address(config: RunConfig, *, is_one_machine: bool) -> Iterator[str]:
    if config.network.host.startswith("127.") and not is_one_machine:
        yield (
            f"network.host={config.network.host}: other machines cannot reach it; set"
            " network.host=auto for the node's address"
        )


def _ranks_of_ray(config: RunConfig, ray: RayLaunch) -> Iterator[str]:
    ranks = config.learner.ranks
    gpus = config.learner.gpus_each
    if 0 < ray.gpus_per_node < ranks * gpus and not ray.shared_run_dir:
        yield (
            f"learner.ranks={ranks} with learner.gpus_each={gpus:g}: with"
            " launcher.shared_run_dir=false the learner's ranks run on the supervisor's node, which"
            f" has the checkpoints, and a node has launcher.gpus_per_node={ray.gpus_per_node};"
            " lower learner.ranks, or set launcher.shared_run_dir=true"
        )


def _cpus_of_slurm(config: RunConfig, slurm: SlurmLaunch) -> Iterator[str]:
    launches = [config_of(config, pool).launcher for pool in generator_pools(config)]
    generator_cpus = [own.generator_cpus for own in launches if isinstance(own, ClusterLaunch)]
    # srun would refuse such a step inside the job, after hours in the queue.
    largest = max(config.verifiers.cells, slurm.learner_cpus, *generator_cpus)
    if 0 < slurm.cpus_per_node < largest:
        yield (
            f"launcher.extra has --cpus-per-task={slurm.cpus_per_node}: a process needs {largest}"
            " (verifiers.cells, launcher.generator_cpus, launcher.learner_cpus); raise it, or"
            " remove it for exclusive nodes"
        )


def step_problems(config: RunConfig, path: str, gpus: float) -> Iterator[str]:
    """Yield the problems of the GPUs of one process with launcher=slurm."""
    slurm = config.launcher
    if not isinstance(slurm, SlurmLaunch):
        return
    # Ray counts fractions of a GPU, and two actors may share one. Slurm binds a device to a step.
    if gpus != int(gpus):
        yield (
            f"{path}={gpus:g}: Slurm assigns whole GPUs to a step; set it to"
            f" {max(1, round(gpus))}, or use launcher=ray"
        )
    if gpus > slurm.gpus_per_node > 0:
        yield (
            f"{path}={gpus:g}: a process runs on one node, which has"
            f" launcher.gpus_per_node={slurm.gpus_per_node}; lower it"
        )
