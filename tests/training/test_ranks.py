"""Facts about where a rank of the learner computes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import compose, compose_unchecked
from warm_processes import script_process

from async_rl.core.errors import ConfigError, NonFiniteError, Superseded
from async_rl.core.machine import Machine
from async_rl.launchers.backends.cluster import on_cluster
from async_rl.learner.loading import learner_device
from async_rl.planning.topology import processes
from async_rl.training import ranks
from async_rl.training.operations import (
    EnterDevice,
    Fetch,
    Gather,
    LeaveDevice,
    Perform,
    Restore,
    Save,
    Score,
    Step,
    Stop,
)
from async_rl.training.ranks import Rank, TrainingPool
from async_rl.weights.tensors import tensor_spec

DONE = SimpleNamespace()
NO_PARTS: Any = SimpleNamespace(pop=lambda version: None)


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


async def test_weights_are_packed_into_one_buffer_of_the_device_and_summed_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[Any] = []
    on_gpu = [torch.ones(1), 2 * torch.ones(2)]

    class Exported:
        def __init__(self, tensors: Any, *, sizes: list[int], device: torch.device) -> None:
            did.append(("export", [t.tolist() for t in tensors], sizes, device.type))
            self.block = len(did)

        def close(self) -> None:
            did.append(f"close {self.block}")

    trainer: Any = SimpleNamespace(
        device=torch.device("cuda"),
        tensor_specs=lambda: [tensor_spec("a", torch.empty(1)), tensor_spec("b", torch.empty(2))],
        adapter=lambda: "adapter",
        full_tensors=lambda: iter(on_gpu),
    )
    monkeypatch.setattr(ranks, "ExportedWeights", Exported)
    block = SimpleNamespace(
        close=list,
        write=lambda version, tensors, sums, *, compares: (
            [t.tolist() for t in tensors],
            len(sums),
            compares,
        ),
    )
    opened: list[Any] = []
    monkeypatch.setattr(ranks, "SharedTensors", lambda *given: opened.append(given) or block)

    # The sums of what the GPU has.
    on_cpu = [[1.0], [2.0, 2.0]]
    pool = await TrainingPool.open(lambda: trainer, "life", NO_PARTS)
    blocks = [await pool.share_on_device(), await pool.share_on_device()]
    await pool.unshare_on_device()
    await pool.unshare_on_device()
    written = [await pool.publish(1, compares=True)]
    trainer.device = torch.device("cpu")
    written.append(await pool.publish(2, compares=False))
    pool.close()
    on_block = [(on_cpu, 2, True), (on_cpu, 0, False)]
    assert [*blocks, *written, pool.adapter] == [1, 3, *on_block, "adapter"]
    assert opened == [(trainer.tensor_specs(), torch.cuda)], "page-locked"
    export = ("export", on_cpu, [4, 8], "cuda")
    assert did == [export, "close 1", export, "close 3"]


@pytest.mark.slow
def test_a_rank_waits_for_rank_0_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_ranks.py")
    ranks = [script_process(script, rank, tmp_path) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    expected = [*(2.0 * version + 1.01 for version in range(20)), []]
    assert (tmp_path / "results").read_text() == repr(expected)


async def test_an_operation_of_another_life_of_the_pool_is_refused() -> None:
    trainer: Any = SimpleNamespace(steps=[])
    trainer.train = lambda part, version: trainer.steps.append(version) or DONE

    rank = await Rank.open(lambda: trainer, "now", NO_PARTS)
    await rank.accept(Perform(pool="now", number=1, operation=Step(version=1)))
    with pytest.raises(Superseded, match="pool before of learner ranks was replaced by now"):
        await rank.accept(Perform(pool="before", number=2, operation=Step(version=2)))
    with pytest.raises(Superseded, match="pool before of learner ranks was replaced by now"):
        await rank.read(Fetch(pool="before", life=1, train_version=2, heads=[]))
    await rank.accept(Perform(pool="now", number=2, operation=Stop()))
    await rank.follow()
    rank.close()
    assert list(trainer.steps) == [1]


async def test_operations_are_numbered_and_use_one_thread() -> None:
    may_end = threading.Event()
    trainer: Any = SimpleNamespace(
        device=torch.device("cpu"), tensor_specs=list, logprobs=lambda rows: may_end.wait(10)
    )
    numbers: list[int] = []

    class Other:
        async def call(self, request: Perform, *, timeout_s: float) -> None:
            numbers.append(request.number)

    before = threading.enumerate()
    pool = await TrainingPool.open(lambda: trainer, "life", NO_PARTS, [Other()])
    leading = [asyncio.create_task(pool.lead(Score(rows=[]))) for _ in range(2)]
    for _ in range(20):  # until both wait for a thread
        await asyncio.sleep(0)
    names = [t.name for t in threading.enumerate() if t not in before]
    may_end.set()
    await asyncio.gather(*leading)
    pool.close()
    assert [name for name in names if name.startswith("trainer_")] == ["trainer_0"]
    assert numbers == [1, 2]


async def test_a_rank_takes_part_in_every_operation_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *given: did.append((name, *given))

    async def fetch(request: Fetch, owners: list[int]) -> None:
        did.append(("fetch", request.train_version, owners))

    names = ("adapter", "logprobs", "save", "load", "enter_device", "leave_device")
    trainer: Any = SimpleNamespace(
        full_tensors=lambda: map(noted("tensor"), "ab"),
        owners=lambda heads, version: [version],
        device=torch.device("cpu"),
        tensor_specs=list,
        **{name: noted(name) for name in names},
    )
    parts: Any = SimpleNamespace(fetch=fetch)

    def broadcast(name: torch.Tensor, src: int) -> None:
        did.append(("broadcast", src))
        name.copy_(torch.tensor(list(b"zero"), dtype=torch.uint8))

    with monkeypatch.context() as patch:
        patch.setattr(ranks.dist, "is_initialized", lambda: True)
        patch.setattr(ranks.dist, "broadcast", broadcast)
        follower = await Rank.open(lambda: trainer, "one_", parts)
    assert follower.pool == "zero", "all ranks have the name of rank 0"
    operations = [
        Gather(),
        Score(rows=[]),
        Save(version=1, directory="s"),
        Restore(directory="r"),
        EnterDevice(),
        LeaveDevice(),
        Stop(),
    ]
    for number, operation in enumerate(operations, 1):
        await follower.accept(Perform(pool="zero", number=number, operation=operation))
    await follower.follow()
    follower.close()
    assert did == [
        ("broadcast", 0),
        ("adapter",),
        ("tensor", "a"),
        ("tensor", "b"),
        ("logprobs", []),
        ("save", Path("s"), 1),
        ("load", Path("r")),
        ("enter_device",),
        ("leave_device",),
    ]
    did.clear()

    class Other:
        async def call(self, request: Fetch, *, timeout_s: float) -> None:
            did.append(("of another rank", request.train_version, timeout_s))

    pool = await TrainingPool.open(lambda: trainer, "life", parts, [Other()])
    await pool.fetch([], 5, life=1, timeout_s=7.0)
    pool.close()
    assert did == [("fetch", 5, [5]), ("of another rank", 5, 7.0)]


async def test_an_operation_that_is_sent_again_is_performed_once() -> None:
    trainer: Any = SimpleNamespace(steps=[])
    trainer.train = lambda part, version: trainer.steps.append(version) or DONE

    rank = await Rank.open(lambda: trainer, "now", NO_PARTS)
    step = Perform(pool="now", number=1, operation=Step(version=1))
    stop = Perform(pool="now", number=2, operation=Stop())
    for request in (step, step, stop, step):
        await rank.accept(request)
    await rank.follow()
    rank.close()
    assert list(trainer.steps) == [1]


async def test_a_rank_is_closed_while_it_computes() -> None:
    rank = await Rank.open(SimpleNamespace, "now", NO_PARTS)
    may_end = threading.Event()
    busy = rank.thread.submit(may_end.wait, 10)
    rank.close()
    assert not busy.done()
    may_end.set()


async def test_a_rank_survives_a_batch_that_rank_0_drops_and_restarts_with_it_after_another() -> (
    None
):
    def train(part: object, version: int) -> Any:
        if version == 1:
            raise NonFiniteError("loss nan")
        if version == 3:
            raise RuntimeError("lost")
        return DONE

    trainer: Any = SimpleNamespace(train=train)
    rank = await Rank.open(lambda: trainer, "now", NO_PARTS)
    for version in (1, 2, 3):
        await rank.accept(Perform(pool="now", number=version, operation=Step(version=version)))
    with pytest.raises(RuntimeError, match="lost"):
        await rank.follow()
    rank.close()


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
        cores=(),
    )
    before = torch.get_num_threads()
    ranks.build_trainer(context, torch.device("cuda", 0))
    assert seen == ["=lo"]
    # A rank of a cluster has no core numbers, and uses the CPUs that it was given.
    assert torch.get_num_threads() == before
    allocator = "expandable_segments:{},pinned_max_cached_size_mb:1"
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == allocator.format(True)
    context.config = compose_unchecked("grpo_code", ["learner.ranks=2", "weights.transfer=ipc"])
    ranks.build_trainer(context, torch.device("cuda", 0))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == allocator.format(False)
    monkeypatch.setattr(os, "environ", {"PYTORCH_ALLOC_CONF": "backend:native"})
    ranks.build_trainer(context, torch.device("cuda", 0))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ, "the user's choice is kept"
