"""Pushes to an engine of two workers in processes of their own, one of which dies in the middle."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from generation_support import make_model, run_scenario, worst_difference
from transformers import Qwen3ForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    path = tmp_path_factory.mktemp("parallel") / "model"
    model = make_model(path, is_tied=True)
    out = path.with_name("said.json")
    # It ends itself as a generator ends that is killed.
    said = run_scenario("tensor_parallel_scenario.py", path, out=out, code=-signal.SIGKILL)
    return model, said


def test_each_worker_receives_weights(case: tuple[Qwen3ForCausalLM, dict[str, Any]]) -> None:
    assert case[1]["devices"] == ["cpu", "cpu"]


def test_each_token_has_the_logprob_of_the_version_that_drew_it(
    case: tuple[Qwen3ForCausalLM, dict[str, Any]],
) -> None:
    model, said = case
    versions = {v for g in said["spanning"] for s in g["samples"] for v in s["versions"]}
    assert len(versions) >= 3, "the pushes were to fall into the groups' life"
    assert max(worst_difference(model, group) for group in said["spanning"]) < 1e-4


def test_a_worker_that_dies_in_a_push_ends_the_engine_and_says_so(
    case: tuple[Qwen3ForCausalLM, dict[str, Any]],
) -> None:
    killed = case[1]["killed_in_a_push"]
    assert killed["workers"] == 2
    assert "a worker process of the engine exited" in killed["load"]
    # vLLM gives the other worker 5 + 4 s; the deadline of the push is 120 s.
    assert killed["seconds"] < 60
    assert killed["after"].startswith("WeightsError: loading version")


def test_no_process_outlives_a_generator_that_is_killed(
    case: tuple[Qwen3ForCausalLM, dict[str, Any]],
) -> None:
    deadline_s = time.monotonic() + 20
    alive = case[1]["processes"]
    while alive and time.monotonic() < deadline_s:
        alive = [pid for pid in alive if _is_alive(pid)]
    assert alive == []


def _is_alive(pid: int) -> bool:
    status = Path("/proc", str(pid), "status")
    return status.exists() and "State:\tZ" not in status.read_text()
