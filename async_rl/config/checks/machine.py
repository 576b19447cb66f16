"""Checks of the configuration against the machine that it is to run on: its cores and GPUs."""

from collections.abc import Iterator

from async_rl.config.pool_sizes import in_words_of, pool_counts
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine


def machine_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield the cores and GPUs that are configured but that the machine does not have.

    Runs on a cluster are not checked: their nodes differ from this machine.
    """
    # The command line may run on a login node without GPUs.
    if not config.launcher.is_one_machine:
        return
    of_pools = [(pool, config_of(config, pool)) for pool in generator_pools(config)]
    cores_of = {
        in_words_of(pool, config, "generators.cores="): own.generators.cores
        for pool, own in of_pools
    }
    for setting, cores in {
        **cores_of,
        "verifiers.cores=": config.verifiers.cores,
        "learner.cores=": config.learner.cores,
    }.items():
        have = ", ".join(map(str, machine.cores))
        if missing := sorted(set(cores) - set(machine.cores)):
            yield (
                f"{setting}{cores}: this machine does not have {', '.join(map(str, missing))}; name"
                f" some of {have}, or [] for all"
            )
        if len(set(cores)) < len(cores):
            yield f"{setting}{cores}: names a core twice; name each core once"
    counts = pool_counts(config)
    taken = [("learner.gpus_each=", config.learner.ranks, config.learner.gpus_each)]
    # A pool of 0 generators takes no GPU yet; async-rl scale runs this check again with its counts.
    taken[:0] = [
        (in_words_of(p, config, "generators.gpus_each="), counts[p], own.generators.gpus_each)
        for p, own in of_pools
        if counts[p]
    ]
    wanted = sum(count * each for _, count, each in taken)
    if wanted > machine.num_gpus:
        yield (
            f"{' and '.join(f'{setting}{each:g} x {count}' for setting, count, each in taken)} need"
            f" {wanted:g} GPUs, this machine has {machine.num_gpus}"
            + (
                f" and {machine.unusable_gpus} that the CPU build of torch or vLLM cannot use"
                if machine.unusable_gpus
                else ""
            )
            + "; lower them, or set them to 0 to use the CPU"
        )
