"""Facts about where a rank of the learner computes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.launchers.backends.cluster import on_cluster
from async_rl.launchers.configuration.compose import compose
from async_rl.planning.topology import processes
from async_rl.training import ranks
from async_rl.training.ranks import TrainingPool, learner_device


def test_every_rank_computes_on_the_first_gpu_that_it_sees_however_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert learner_device(1) == torch.device("cuda", 0)
    assert learner_device(0) == torch.device("cpu"), (
        "GPUs of the machine that it was not given are left alone"
    )


def test_gpus_that_torch_cannot_use_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"learner.gpus_each=1 but torch .* finds no CUDA GPU here"
    ):
        learner_device(1)


def test_a_process_without_gpus_sees_none_of_its_node_and_the_cluster_names_the_others_gpus() -> (
    None
):
    config = compose(
        "ppo_code",
        [
            "launcher=ray",
            "learner.gpus_each=1",
            "generators.gpus_each=0",
            "generation.vllm.kv_cache_mb=64",
        ],
    )
    specs = processes(config, Machine(cores=(0, 1), num_gpus=1, memory_mb=8000))
    visible = {
        spec.name: on_cluster(config, spec).env.get("CUDA_VISIBLE_DEVICES") for spec in specs
    }
    assert visible == {"buffer": "", "verifier-0": "", "generator-0": "", "learner-0": None}


def test_weights_are_packed_into_one_buffer_of_the_device_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[Any] = []

    class Exported:
        def __init__(self, tensors: Any, *, size_bytes: int, device: torch.device) -> None:
            did.append(("export", list(tensors), size_bytes, device.type))
            self.block = len(did)

        def close(self) -> None:
            did.append(f"close {self.block}")

    trainer: Any = SimpleNamespace(
        device=torch.device("cuda"),
        tensor_specs=lambda: [("a", "float32", (1,), 4), ("b", "float32", (2,), 8)],
        full_tensors=lambda *, on_device: iter(
            ["a on the device", "b on the device"] if on_device else []
        ),
    )
    monkeypatch.setattr(ranks, "ExportedWeights", Exported)
    monkeypatch.setattr(ranks, "WeightPublisher", lambda specs: SimpleNamespace(close=list))

    async def story() -> list[Any]:
        pool = await TrainingPool.open(lambda: trainer)
        blocks = [await pool.share_on_device(), await pool.share_on_device()]
        await pool.unshare_on_device()
        await pool.unshare_on_device()
        pool.close()
        return blocks

    assert asyncio.run(story()) == [1, 3]
    export = ("export", ["a on the device", "b on the device"], 12, "cuda")
    assert did == [export, "close 1", export, "close 3"]
