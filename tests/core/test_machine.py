"""Facts about what a machine offers: GPUs as the driver reports them, and only where the packages
can use them, under the names that the user's own choice gives them.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import compose
from tables import table

from async_rl.core import machine
from async_rl.core.machine import Gpu, Gpus, visible_gpus
from async_rl.launchers.backends.local import child_env
from async_rl.planning.topology import processes


@pytest.mark.parametrize(("vllm", "cuda", "can"), table(__file__, "gpus_count_only_with_packages"))
def test_gpus_count_only_with_packages_that_use_them(
    vllm: str, cuda: str | None, can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2'\n{cuda}\nhip: Optional[str] = 'x'\n")

    def discover(*, name: str) -> Iterator[str]:
        return iter([vllm] if name == vllm else [])

    found = (
        None
        if cuda is None
        else importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    )
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", discover)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    devices = tuple(Gpu(uuid=f"GPU-{n}", name="H100", memory_mb=81920) for n in range(6))
    monkeypatch.setattr(machine, "read_gpus", lambda: Gpus(driver="580", devices=devices))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    here = machine.this_machine()
    assert (here.num_gpus, here.unusable_gpus) == ((2, 0) if can else (0, 2))


def test_the_users_choice_of_gpus_is_read_as_cuda_reads_it() -> None:
    for visible, names in table(__file__, "the_users_choice_of_gpus"):
        assert machine.chosen_gpus({"CUDA_VISIBLE_DEVICES": visible}) == names


def test_each_process_gets_gpus_out_of_those_that_the_user_left() -> None:
    here = machine.Machine(cores=(0, 1), num_gpus=3, memory_mb=64_000)
    words = ["generators.count=2", "generators.gpus_each=1", "learner.gpus_each=1"]
    given = {"CUDA_VISIBLE_DEVICES": "4,6,GPU-c3", "HOME": "/h"}
    specs = processes(compose("ppo_code", words), here)
    seen = {spec.name: child_env(spec, given)["CUDA_VISIBLE_DEVICES"] for spec in specs}
    taken = {"learner-0": "4", "generator-0": "6", "generator-1": "GPU-c3"}
    assert seen == {"buffer": "", "verifier-0": "", **taken}


def system(root: Path, *, nodes: list[str], siblings: list[str]) -> Path:
    for number, text in enumerate(nodes):
        (root / "node" / f"node{number}").mkdir(parents=True)
        (root / "node" / f"node{number}" / "cpulist").write_text(text + "\n")
    for text in siblings:
        for cpu in text.split(","):
            topology = root / "cpu" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(text + "\n")
    return root


def test_siblings_are_adjacent_and_nodes_follow_each_other(tmp_path: Path) -> None:
    # Two sockets of two cores with two hyperthreads each, as Linux numbers them.
    of_two_sockets = system(
        tmp_path, nodes=["0-1,4-5", "2-3,6-7"], siblings=["0,4", "1,5", "2,6", "3,7"]
    )
    cpus = machine.arranged(range(8), of_two_sockets)
    assert cpus.cores == (0, 4, 1, 5, 2, 6, 3, 7)
    assert cpus.core_nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert cpus.threads_per_core == 2
    assert machine.arranged([6, 0, 4], of_two_sockets).cores == (0, 4, 6)
    # A kernel that lists nothing has one node and no hyperthreads.
    cpus = machine.arranged([3, 1], tmp_path / "nothing")
    assert (cpus.cores, cpus.core_nodes, cpus.threads_per_core) == ((1, 3), (0, 0), 1)


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


def test_the_driver_reports_every_device_and_what_it_lacks(played: Path) -> None:
    # In a process of its own, which loads the library.
    answers = {"PLAYED_DRIVER": "580.65.06", "PLAYED_GPUS": "80:0:0,80:1:1,40:-1:-1"}
    code = "from async_rl.core.machine import read_gpus; print(read_gpus())"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(played), **answers},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    gpus = eval(shown, {"Gpu": Gpu, "Gpus": Gpus})
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
