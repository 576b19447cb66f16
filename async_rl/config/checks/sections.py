"""Checks of single sections: weight pushes, the launcher, data files, a training service.

Part of `checks/run.py`, whose invariants hold here.
"""

from collections.abc import Iterator

from async_rl.config.data import DataConfig
from async_rl.config.launchers import ClusterLaunch
from async_rl.config.plugins import DATA_SOURCE, is_plugin
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.run import RunConfig


def weights_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line per problem."""
    weights = config.weights
    bound = config.buffer.max_staleness_versions
    # Admission waits for a newer version, which only the blocked step would make.
    if weights.push_every_steps - 1 > bound:
        yield (
            f"weights.push_every_steps={weights.push_every_steps} with"
            f" buffer.max_staleness_versions={bound}: between pushes generators are"
            f" {weights.push_every_steps - 1} versions behind and admission would stop forever;"
            f" raise buffer.max_staleness_versions to at least {weights.push_every_steps - 1}, or"
            " lower weights.push_every_steps"
        )
    if config.buffer.age_rule == "exact" and weights.push_every_steps > 1:
        yield (
            f"weights.push_every_steps={weights.push_every_steps} with buffer.age_rule=exact: every"
            " batch needs the weights of another step, and admission would stop forever; set"
            " weights.push_every_steps=1"
        )
    yield from _adapter(config)


def _adapter(config: RunConfig) -> Iterator[str]:
    """Yield the problems of an adapter that an engine applies."""
    lora = config.model.adapter
    if lora is None or not config.model.is_applied:
        return
    given = f"model.lora.slots={lora.slots}"
    if lora.slots > 1 and not config.agent.is_service:
        yield f"{given}: a run has one adapter; set model.lora.slots=1"
    if not config.generation.is_vllm:
        yield (
            f"{given} with generation.engine={config.generation.engine}: only vLLM applies"
            " adapters; set generation.engine=vllm"
        )
    if config.takes_turns:
        yield (
            f"{given} with placement=colocated: an engine that applies adapters does not sleep; set"
            " placement=disaggregated"
        )
    if config.weights.transfer.kind not in ("auto", "filesystem"):
        yield (
            f"{given} with weights.transfer={config.weights.transfer.kind}: only files carry an"
            " adapter; set weights.transfer=auto"
        )


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the chosen launcher."""
    cluster = config.launcher
    if config.network.host.startswith("127.") and not (
        cluster.is_one_machine or cluster.uses_one_node
    ):
        yield (
            f"network.host={config.network.host}: other machines cannot reach it; set"
            " network.host=auto for the node's address"
        )
    if not isinstance(cluster, ClusterLaunch):
        return
    yield from step_problems(config, "learner.gpus_each", config.learner.gpus_each)
    yield from _cpus(config, cluster)


def _cpus(config: RunConfig, cluster: ClusterLaunch) -> Iterator[str]:
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


def step_problems(config: RunConfig, path: str, gpus: float) -> Iterator[str]:
    """Yield the problems of the GPUs of one process on a cluster."""
    cluster = config.launcher
    if not isinstance(cluster, ClusterLaunch):
        return
    if gpus != int(gpus) and not cluster.shares_devices:
        yield (
            f"{path}={gpus:g}: launcher={cluster.kind} assigns whole GPUs to a process; set it to"
            f" {max(1, round(gpus))}, or use launcher=ray"
        )
    if gpus > cluster.gpus_per_node > 0:
        yield (
            f"{path}={gpus:g}: a process runs on one node, which has"
            f" launcher.gpus_per_node={cluster.gpus_per_node}; lower it"
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


_FEWEST_SLOTS = 4
"""One for the engine's own policy, one whose weights change, two for adapters from directories."""


def service_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that a service cannot have."""
    if not config.agent.is_service:
        return
    name = f"rollout.fn={config.rollout.fn}"
    adapter = config.model.adapter
    if adapter is not None and adapter.slots < _FEWEST_SLOTS:
        yield (
            f"model.lora.slots={adapter.slots} with {name}: every program trains an adapter on the"
            f" same base model; set it to {_FEWEST_SLOTS} or more"
        )
    if adapter is None and config.model.dtype != "float32":
        yield (
            f"model.dtype={config.model.dtype} with {name} and model.lora=none: a step is smaller"
            " than the distance of two such numbers; set model.dtype=float32"
        )
    if not config.generation.is_vllm:
        yield f"generation.engine={config.generation.engine} with {name}: set it to vllm"
    if config.learner.ranks > 1:
        yield f"learner.ranks={config.learner.ranks} with {name}: not supported; set it to 1"
