"""Checks of single sections: the launcher and the data files.

Part of `checks/run.py`, whose invariants hold here.
"""

from collections.abc import Iterator

from async_rl.config.data import DataConfig
from async_rl.config.launchers import ClusterLaunch
from async_rl.config.plugins import DATA_SOURCE, is_plugin
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the chosen launcher."""
    cluster = config.launcher
    if config.network.host.startswith("127.") and not cluster.uses_one_node:
        yield (
            f"network.host={config.network.host}: other machines cannot reach it; set"
            " network.host=auto for the node's address"
        )
    if not isinstance(cluster, ClusterLaunch):
        return
    launches = [config_of(config, pool).launcher for pool in generator_pools(config)]
    generator_cpus = [own.generator_cpus for own in launches if isinstance(own, ClusterLaunch)]
    # The cluster would refuse such a process inside the job, after hours in the queue.
    largest = max(config.verifiers.cells, cluster.learner_cpus, *generator_cpus)
    if 0 < cluster.cpus_per_node < largest:
        yield (
            f"launcher.extra has --cpus-per-task={cluster.cpus_per_node}: a process needs {largest}"
            " (verifiers.cells, launcher.generator_cpus, launcher.learner_cpus); raise it, or"
            " remove it for exclusive nodes"
        )


def file_problems(data: DataConfig) -> Iterator[str]:
    """Yield the files and data sources whose names cannot be used together."""
    for name, files in (("train_files", data.train_files), ("val_files", data.val_files)):
        # Each file once, so that one that is named three times is one problem.
        for file in dict.fromkeys(files):
            is_file = file.endswith((".jsonl", ".json", ".parquet"))
            if not is_file and not is_plugin(file, DATA_SOURCE):
                yield (
                    f"data.{name}={file}: the file's ending must show its format; name a .jsonl,"
                    " .json or .parquet file"
                )
            if files.count(file) > 1:
                yield f"data.{name}={file}: is named twice; name each file once"
    for file in sorted(set(data.train_files) & set(data.val_files)):
        yield (
            f"data.val_files={file}: is also in data.train_files, so nothing is held out; name a"
            " file that is not used for training"
        )
