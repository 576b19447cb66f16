"""Two runs train an adapter each on the engine of the first, which stays for the second.

The weights of the adapters travel through files, as between machines.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest
from e2e_support import SMALL, LiveRun, async_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

LORA = (
    *(setting for setting in SMALL if setting != "generation.engine=hf"),
    "model.lora=lora",
    "weights.probe_every_pushes=1",
    "weights.transfer=filesystem",
)

PROBE = "weights/probe_abs_max"


def test_two_runs_share_an_engine_lose_nothing_when_it_is_killed_and_end_with_the_host(
    launch: Callable[..., LiveRun],
) -> None:
    first = launch(*LORA, "model.lora.slots=2", "num_steps=6", name="first")
    first.until((first.run_dir / "control.json").exists, "the first run serves")
    full = async_rl(
        "launch",
        *LORA,
        f"model.lora.host={first.run_dir}",
        "model.lora.rank=32",
        f"output_dir={first.run_dir.parent}",
    )
    assert full.returncode == 2
    assert "model.lora.rank=32 is above the model.lora.rank=16 of first" in full.stderr
    # Its own rate and seed: another experiment on the same model.
    second = launch(
        *LORA,
        f"model.lora.host={first.run_dir}",
        "num_steps=100000",
        "learner.optimizer.lr=1e-3",
        "seed=7",
        "supervisor.max_restarts=2",
        name="second",
    )
    names: set[str] = set()

    def has_files() -> bool:
        names.update(path.name for path in (second.run_dir / "weights").glob("life_*/*"))
        return bool(names)

    second.until(has_files, "a file of an adapter", look_s=0.01)
    assert {name.partition("_")[0] for name in names} == {"adapter"}
    second.until(lambda: second.step >= 2 and first.step >= 2, "both train")
    thin = psutil.Process(second.pid_of("generator-0"))
    engine = psutil.Process(first.pid_of("generator-0"))
    assert thin.memory_info().rss < engine.memory_info().rss / 2
    first.kill("generator-0", signal.SIGKILL)
    stays = "the generators serve second/generator-0 (model.lora.host)"
    first.until(lambda: first.step == 6 and stays in first.terminal, "the host has trained")
    at = second.step
    second.until(lambda: second.step >= at + 3, "steps of the guest after those of its host")
    # The other run's command names the first one, so `kill_all` would wait for it too.
    first.process.kill()
    first.process.wait()
    assert second.wait() == 1
    assert "first is not running" in second.terminal
    for run in (first, second):
        assert run.audit()["problems"] == []
        # Every push was probed: the engine computes each learner's own policy.
        probes = [row[PROBE] for row in run.rows if PROBE in row]
        assert len(probes) > run.step / 2
        assert max(probes) < 1e-3
