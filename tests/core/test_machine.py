"""Facts about what a machine offers: GPUs only where the packages can use them, under the names
that the user's own choice gives them.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import compose
from tables import table

from async_rl.composition.hardware import described, preset_for
from async_rl.config.checks.run import machine_problems
from async_rl.core import machine
from async_rl.core.machine import Gpu, Gpus
from async_rl.launchers.backends.local import child_env
from async_rl.planning.topology import processes

LAPTOP = machine.Machine(cores=(0, 1), num_gpus=0, memory_mb=16_000, unusable_gpus=1)


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


def test_gpus_that_the_packages_cannot_use_leave_the_run_on_the_cpu_and_are_said() -> None:
    assert preset_for(LAPTOP, is_cluster=False) == "cpu"
    assert described(LAPTOP) == "2 cores, no GPUs (1 unused: torch or vLLM is a CPU build), 15 GB"
    words = ["learner.gpus_each=1", "generators.cores=[0]", "learner.cores=[1]"]
    (line,) = machine_problems(compose("ppo_code", words), LAPTOP)
    assert "this machine has 0 that torch and vLLM can use; lower them, or set them to 0" in line


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
