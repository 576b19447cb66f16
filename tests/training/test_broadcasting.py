"""Broadcasts to ranks that connect for real: what arrives, who shares a communicator, and what
becomes of the others when one is lost.
"""

import collections
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pushing_support import Learner, bytes_of
from receiving_process import Generator, digest

from async_rl.protocol.base import Message
from async_rl.weights import broadcast, sending
from async_rl.weights.sending import SendingRank

NUM_TENSORS = 12
ROWS = 2**13 + 5  # half a bucket each

pytestmark = pytest.mark.slow
# A fleet of so many ranks of the learner, around these generators.
Make = Callable[..., Learner]


class OtherRank(SendingRank):
    """Rank 1 of the learner, in this process. Each request comes twice, as after a lost answer."""

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        await self.handlers[type(request)](request)
        return await self.handlers[type(request)](request)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    # The tensors then need several buckets.
    monkeypatch.setitem(broadcast.BUCKET_BYTES, "gloo", 1 << 16)
    made: list[Learner] = []

    def make(
        generators: dict[str, Generator], *overrides: str, num_ranks: int = 1, gpu: str = ""
    ) -> Learner:
        settings = ("weights.transfer=collective", "timeouts.start_s=120", *overrides)
        sizes = {"num_tensors": NUM_TENSORS, "rows": ROWS}
        learner = Learner(tmp_path, generators, *settings, **sizes, device=f"{gpu or 'cpu'}:0")
        device = torch.device("cuda:3" if gpu else "cpu")
        learner.others = [OtherRank(device, host="127.0.0.1") for _ in range(num_ranks - 1)]
        learner.end_process = lambda name: generators[name].end()
        for name, generator in generators.items():
            generator.on_death = lambda name=name: learner.leave(name)
        made.append(learner)
        return learner

    yield make
    for learner in made:
        for closed in (*learner.generators.values(), *learner.others):
            closed.end() if isinstance(closed, Generator) else closed.close()


def expected(*versions: int, num_ranks: int = 1) -> list[list[str]]:
    names = ["embed", *(f"layer {number}" for number in range(1, NUM_TENSORS))]
    found = []
    for version in versions:
        tensors = ((n, torch.from_numpy(bytes_of(version, i, ROWS))) for i, n in enumerate(names))
        found.append([digest(tensors)] * num_ranks)
    return found


def communicators(generator: Generator) -> list[str]:
    return [seat.communicator for seat in generator.seats]


async def push(learner: Learner, *versions: int) -> None:
    async with learner.running():
        learner.serve(*learner.generators)
        await learner.push(*versions)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_all_ranks_of_all_members_get_each_version_bit_for_bit_and_keep_their_communicator(
    num_ranks: int, fleet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of the learner send in turn."""
    generators = {"a": Generator(), "b": Generator(devices=("cpu", "cpu"))}
    learner = fleet(generators, num_ranks=num_ranks)
    num_staged: collections.Counter[int] = collections.Counter()

    class Counted(sending.Unstaged):
        def stage(self, source: torch.Tensor) -> torch.Tensor:
            num_staged[threading.get_ident()] += 1
            return super().stage(source)

    monkeypatch.setattr(sending, "Unstaged", Counted)
    await push(learner, 0, 1, 2)
    for generator in generators.values():
        assert generator.versions == [0, 1, 2]
        assert generator.digests == expected(0, 1, 2, num_ranks=len(generator.devices))
        assert set(communicators(generator)) == {"one.1"}
    places = [(g.seats[0].first_rank, g.seats[0].world_size) for g in generators.values()]
    assert places == [(num_ranks, num_ranks + 3), (num_ranks + 1, num_ranks + 3)]
    assert list(num_staged.values()) == [3 * NUM_TENSORS // num_ranks] * num_ranks
    assert learner.cut_off == []


async def test_a_member_that_dies_before_all_ranks_have_met_does_not_keep_the_others_waiting(
    fleet: Make,
) -> None:
    generators = {"a": Generator(), "b": Generator()}
    # Half of it is longer than the test may take.
    learner = fleet(generators, "timeouts.start_s=3000")
    generators["b"].end()
    await push(learner, 0)
    assert generators["a"].digests == expected(0)
    assert communicators(generators["a"]) == ["one.1", "one.2"]


async def test_a_learner_that_ends_leaves_no_member_in_a_communicator_that_it_has_not_joined(
    fleet: Make,
) -> None:
    generators = {"a": Generator(), "b": Generator()}
    learner = fleet(generators)

    async with learner.running():
        learner.serve(*generators)
        await learner.pusher.publish(0)
        await generators["b"].is_asked.wait()
        await learner.pusher.settle()  # its process ends now
    assert [g.digests for g in generators.values()] == [expected(0)] * 2


async def test_a_machine_that_vanishes_during_a_broadcast_keeps_nobody_waiting(fleet: Make) -> None:
    """Its connections stay open, and half of the limit is longer than the test may take."""
    generators = {"a": Generator(), "b": Generator(misfortune="vanishes"), "c": Generator()}
    learner = fleet(generators, "timeouts.start_s=3000")
    async with learner.running():
        learner.serve(*generators)
        await learner.push(0, 1)
        generators["b"].end()
    assert [generators[name].digests for name in "ac"] == [expected(0, 1)] * 2


@pytest.mark.parametrize(("misfortune", "num_ranks"), [("dies", 2), ("hangs", 1)])
async def test_the_others_get_the_version_in_another_load_when_one_is_lost(
    misfortune: str, num_ranks: int, fleet: Make
) -> None:
    """With two ranks rank 1 sends the tensor in which it is lost."""
    generators = {"a": Generator(), "b": Generator(misfortune=misfortune), "c": Generator()}
    # The others give up after a sixth of it, which has to do for a busy machine.
    learner = fleet(generators, "timeouts.start_s=15", num_ranks=num_ranks)
    await push(learner, 0, 1)
    assert [generators[name].digests for name in "ac"] == [expected(0, 1)] * 2
    assert generators["b"].versions == [0]
    assert [e.name for e in learner.cut_off] == (["b"] if misfortune == "hangs" else [])


def gpus(count: int) -> Any:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(
        found < count, reason=f"NCCL needs {count} GPUs for {count} ranks; this machine has {found}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(2 + n)) for n in (1, 2)])
async def test_nccl_brings_each_version_bit_for_bit(num_ranks: int, fleet: Make) -> None:
    generators = {"a": Generator(devices=("cuda:1",)), "b": Generator(devices=("cuda:2",))}
    settings = ("generators.gpus_each=1", "learner.gpus_each=1")
    await push(fleet(generators, *settings, num_ranks=num_ranks, gpu="cuda"), 0, 1, 2)
    assert [g.digests for g in generators.values()] == [expected(0, 1, 2)] * 2
    assert {seat.backend for g in generators.values() for seat in g.seats} == {"nccl"}
