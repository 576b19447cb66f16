"""The GPUs that NVIDIA's driver reports through its management library, NVML.

Device files and CUDA_VISIBLE_DEVICES are not evidence of a GPU: a container can have the files
without the driver, and the variable may name devices that do not exist.
"""

from __future__ import annotations

import contextlib

import pynvml

from async_rl.core.frozen import frozen


@frozen
class Gpu:
    """One device.

    memory_mb: its whole memory.  is_mig: whether it is divided into instances (MIG).
    numa_node: the memory node that it is attached to, None where the driver does not report one.
    """

    uuid: str
    name: str
    memory_mb: int
    is_mig: bool = False
    numa_node: int | None = None


@frozen
class Gpus:
    """The answer of the driver.

    driver: its version.  devices: in the driver's order, as with CUDA_DEVICE_ORDER=
    PCI_BUS_ID.  problem: the reason if the driver did not answer, else empty.
    """

    driver: str = ""
    devices: tuple[Gpu, ...] = ()
    problem: str = ""


def read_gpus() -> Gpus:
    """Ask the driver for the GPUs. Without a driver the list is empty and `problem` says why."""
    # A machine without GPUs has no driver, and that is fine.
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    try:
        num = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(num)]
        return Gpus(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            devices=tuple(_gpu(handle) for handle in handles),
        )
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    is_mig = False
    numa_node = None
    # Some devices lack one of these two facts, and are usable without it.
    with contextlib.suppress(pynvml.NVMLError):
        is_mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    with contextlib.suppress(pynvml.NVMLError):
        numa_node = int(pynvml.nvmlDeviceGetNumaNodeId(handle))
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_mb=pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
        is_mig=is_mig,
        numa_node=numa_node,
    )
