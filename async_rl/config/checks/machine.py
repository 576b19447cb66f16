"""Checks of the configuration against the machine that it is to run on: its cores and GPUs."""

from collections.abc import Iterator

from async_rl.config.pool_sizes import in_words_of, pool_counts
from async_rl.config.pools import pool_configs
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine


def machine_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield the cores and GPUs that are configured but that the machine does not have.

    Runs on a cluster are not checked: their nodes differ from this machine.
    """
    # The command line may run on a login node without GPUs.
    if not config.launcher.is_one_machine:
        return
    pools = {pool: own.generators for pool, own in pool_configs(config).items()}
    cores_of = {
        in_words_of(pool, config, "generators.cores="): own.cores for pool, own in pools.items()
    }
    cores_of["verifiers.cores="] = config.verifiers.cores
    cores_of["learner.cores="] = config.learner.cores
    have = ", ".join(map(str, machine.cores))
    for setting, cores in cores_of.items():
        if missing := sorted(set(cores) - set(machine.cores)):
            yield (
                f"{setting}{cores}: this machine does not have {', '.join(map(str, missing))}; name"
                f" some of {have}, or [] for all"
            )
    counts = pool_counts(config)
    # A pool of 0 generators takes no GPU yet; async-rl scale runs this check again with its counts.
    taken = [
        (in_words_of(pool, config, "generators.gpus_each="), counts[pool], own.gpus_each)
        for pool, own in pools.items()
        if counts[pool]
    ]
    taken.append(("learner.gpus_each=", config.learner.ranks, config.learner.gpus_each))
    wanted = sum(count * each for _, count, each in taken)
    if wanted > machine.num_gpus:
        users = " and ".join(f"{setting}{each:g} x {count}" for setting, count, each in taken)
        yield (
            f"{users} need {wanted:g} GPUs, this machine has {machine.num_gpus} that torch and"
            " vLLM can use; lower them, or set them to 0 to use the CPU"
        )
