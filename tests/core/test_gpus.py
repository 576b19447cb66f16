"""Facts about the GPUs that the driver reports, with a library that answers in NVML's place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from async_rl.core.machine import Gpu, Gpus, visible_gpus

SOURCE = Path(__file__).with_name("played_nvml.c")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a libnvidia-ml.so.1 that reads its answers from the environment."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine, to make the library")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library.parent


def answer(played: Path, code: str, **variables: str) -> str:
    """Run code in a process of its own, which loads the library."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(played), "COLUMNS": "400", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


def read(played: Path, **variables: str) -> Gpus:
    code = "from async_rl.core.machine import read_gpus; print(read_gpus())"
    shown = answer(played, code, **variables)
    gpus = eval(shown, {"Gpu": Gpu, "Gpus": Gpus})
    assert isinstance(gpus, Gpus)
    return gpus


def test_the_driver_reports_every_device_and_what_it_lacks(played: Path) -> None:
    gpus = read(played, PLAYED_DRIVER="580.65.06", PLAYED_GPUS="80:0:0,80:1:1,40:-1:-1")
    large = {"name": "Played 80 GB", "memory_mb": 81920}
    assert (gpus.driver, gpus.problem) == ("580.65.06", "")
    assert gpus.devices == (
        Gpu(uuid="GPU-0", numa_node=0, **large),
        Gpu(uuid="GPU-1", numa_node=1, is_mig=True, **large),
        Gpu(uuid="GPU-2", name="Played 40 GB", memory_mb=40960),
    )


def two(**changes: object) -> Gpus:
    one: dict[str, object] = {"uuid": "GPU-a", "name": "H100", "memory_mb": 80 << 10}
    devices = (Gpu(**one), Gpu(**{**one, "uuid": "GPU-b", **changes}))  # type: ignore[arg-type]
    return Gpus(driver="580.65", devices=devices)


def test_only_devices_of_the_driver_and_their_instances_count() -> None:
    gpus = two()
    for visible, numbers in table(__file__, "only_devices_of_the_driver"):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert visible_gpus(env, gpus) == [gpus.devices[number] for number in numbers], visible
    gpus = two(is_mig=True)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,MIG-x"}, gpus) == [gpus.devices[0], None]
