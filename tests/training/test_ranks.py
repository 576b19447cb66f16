"""Facts about where a rank of the learner computes."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import compose

from async_rl.core.errors import ConfigError, NonFiniteError, Superseded
from async_rl.core.machine import Machine
from async_rl.launchers.backends.cluster import on_cluster
from async_rl.learner.loading import learner_device
from async_rl.planning.topology import processes
from async_rl.training import ranks
from async_rl.training.operations import Fetch, Perform, Step, Stop
from async_rl.training.ranks import Rank

DONE = SimpleNamespace()
NO_PARTS: Any = SimpleNamespace(pop=lambda version: None)


def test_a_rank_computes_on_the_first_gpu_that_it_sees_if_it_has_one_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert learner_device(1) == torch.device("cuda", 0)
    assert learner_device(0) == torch.device("cpu"), "it was given none of the machine's"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner.gpus_each=1 but torch .* finds no CUDA GPU"):
        learner_device(1)


def test_a_process_without_gpus_sees_none_of_its_node_and_the_cluster_names_the_others_gpus() -> (
    None
):
    settings = ["launcher=ray", "learner.gpus_each=1", "generators.gpus_each=0"]
    config = compose("ppo_code", [*settings, "generation.vllm.kv_cache_mb=64"])
    specs = processes(config, Machine(cores=(0, 1), num_gpus=1, memory_mb=8000))
    visible = {
        spec.name: on_cluster(config, spec).env.get("CUDA_VISIBLE_DEVICES") for spec in specs
    }
    assert visible == {"buffer": "", "verifier-0": "", "generator-0": "", "learner-0": None}


async def test_a_rank_performs_each_operation_of_its_pool_once_and_drops_what_rank_0_drops() -> (
    None
):
    """After any other error the ranks restart together."""
    steps: list[int] = []

    def train(part: object, version: int) -> Any:
        steps.append(version)
        if version == 1:
            raise NonFiniteError("loss nan")
        if version == 3:
            raise RuntimeError("lost")
        return DONE

    trainer: Any = SimpleNamespace(train=train)
    rank = await Rank.open(lambda: trainer, "now", NO_PARTS)
    for number in (1, 2, 1, 3, 2):
        step = Step(version=number)
        await rank.accept(Perform(pool="now", number=number, operation=step))
    replaced = "pool before of learner ranks was replaced by now"
    with pytest.raises(Superseded, match=replaced):
        await rank.accept(Perform(pool="before", number=9, operation=Stop()))
    with pytest.raises(Superseded, match=replaced):
        await rank.read(Fetch(pool="before", life=1, train_version=2, heads=[]))
    with pytest.raises(RuntimeError, match="lost"):
        await rank.follow()
    assert steps == [1, 2, 3]
    # It is closed while it computes.
    may_end = threading.Event()
    busy = rank.thread.submit(may_end.wait, 10)
    rank.close()
    assert not busy.done()
    may_end.set()


def test_nccl_has_its_interface_before_the_first_group_of_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(
        ranks.sharding, "join", lambda *_, **__: seen.append(os.environ["NCCL_SOCKET_IFNAME"])
    )
    monkeypatch.setattr(ranks, "Trainer", lambda *_, **__: None)
    context: Any = SimpleNamespace(
        config=compose("grpo_code", ["learner.ranks=2"]),
        run_dir=tmp_path,
        model_path=tmp_path,
        rank=0,
        host="127.0.0.1",
    )
    ranks.build_trainer(context, torch.device("cuda", 0))
    assert seen == ["=lo"]
    allocator = "expandable_segments:True,pinned_max_cached_size_mb:1"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == allocator
    monkeypatch.setattr(os, "environ", {"PYTORCH_ALLOC_CONF": "backend:native"})
    ranks.build_trainer(context, torch.device("cuda", 0))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ, "the user's choice is kept"
