"""Broadcasts to real processes: what arrives, who shares a communicator, and what becomes of the
others when one is lost.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pushing_support import Learner, bytes_of
from receiving_process import Generator, digest

from async_rl.protocol.base import Message
from async_rl.protocol.weights import SendPart
from async_rl.weights import broadcast, sending
from async_rl.weights.sending import SendingRank

NUM_TENSORS = 40
ROWS = 2**17 + 5  # half a MB each, so that a bucket of 1 MB holds one

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Learner]]:
    """Makes a learner that broadcasts to these generators, whose processes end with the test."""
    # The tensors then need several buckets.
    monkeypatch.setitem(broadcast.BUCKET_BYTES, "gloo", 1 << 20)
    all_generators: list[Generator] = []

    def make(generators: dict[str, Generator], *overrides: str, device: str = "cpu") -> Learner:
        all_generators.extend(generators.values())
        settings = ("weights.transfer=collective", "timeouts.start_s=120", *overrides)
        learner = Learner(
            tmp_path, generators, *settings, num_tensors=NUM_TENSORS, rows=ROWS, device=device
        )
        learner.end_process = lambda name: generators[name].process.kill()
        for name, generator in generators.items():
            generator.on_death = lambda name=name: learner.leave(name)
        return learner

    yield make
    for generator in all_generators:
        generator.end()


def expected(version: int) -> str:
    names = ["embed", *(f"layer {number}" for number in range(1, NUM_TENSORS))]
    return digest(
        (name, torch.from_numpy(bytes_of(version, number, ROWS)))
        for number, name in enumerate(names)
    )


def communicators(generator: Generator) -> list[str]:
    return [seat.communicator for seat in generator.seats]


async def push(learner: Learner, *versions: int) -> None:
    for version in versions:
        await learner.pusher.publish(version)
        await learner.pusher.live(version)


def test_all_ranks_of_all_members_get_each_version_bit_for_bit_and_keep_their_communicator(
    fleet: Callable[..., Learner],
) -> None:
    generators = {"a": Generator(), "b": Generator(devices=("cpu", "cpu")), "c": Generator()}
    learner = fleet(generators)

    async def story() -> None:
        learner.serve(*generators)
        await push(learner, 0, 1, 2)

    learner.run(story)
    assert [g.versions for g in generators.values()] == [[0, 1, 2]] * 3
    assert [g.digests for g in generators.values()] == [
        [[expected(v)] * len(g.devices) for v in (0, 1, 2)] for g in generators.values()
    ]
    assert [(g.seats[0].first_rank, g.seats[0].world_size) for g in generators.values()] == [
        (1, 5),
        (2, 5),
        (4, 5),
    ]
    assert {name for g in generators.values() for name in communicators(g)} == {"one.1"}
    assert learner.cut_off == []


class OtherRank(SendingRank):
    """Rank 1 of the learner, in this process."""

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        return await self.handlers[type(request)](request)


@pytest.fixture
def other_rank() -> Iterator[OtherRank]:
    rank = OtherRank(torch.device("cpu"), host="127.0.0.1")
    yield rank
    rank.close()


def test_two_ranks_of_the_learner_send_in_turn_and_each_version_arrives_bit_for_bit(
    fleet: Callable[..., Learner], other_rank: OtherRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = {"a": Generator(), "b": Generator(devices=("cpu", "cpu"))}
    learner = fleet(generators)
    learner.others = [other_rank]
    num_staged: collections.Counter[int] = collections.Counter()

    class Counted(sending.Unstaged):
        def stage(self, source: torch.Tensor) -> torch.Tensor:
            num_staged[threading.get_ident()] += 1
            return super().stage(source)

    monkeypatch.setattr(sending, "Unstaged", Counted)

    async def story() -> None:
        learner.serve(*generators)
        await push(learner, 0, 1, 2)

    learner.run(story)
    assert [g.digests for g in generators.values()] == [
        [[expected(v)] * len(g.devices) for v in (0, 1, 2)] for g in generators.values()
    ]
    assert [(g.seats[0].first_rank, g.seats[0].world_size) for g in generators.values()] == [
        (2, 5),
        (3, 5),
    ]
    assert {name for g in generators.values() for name in communicators(g)} == {"one.1"}
    assert list(num_staged.values()) == [3 * NUM_TENSORS // 2] * 2


def test_a_member_that_dies_before_all_ranks_have_met_does_not_keep_the_others_waiting(
    fleet: Callable[..., Learner],
) -> None:
    generators = {"a": Generator(), "b": Generator()}
    learner = fleet(
        generators, "timeouts.start_s=3000"
    )  # half of it is longer than the test may take

    async def story() -> None:
        generators["b"].process.kill()
        learner.serve(*generators)
        await push(learner, 0)

    learner.run(story)
    assert generators["a"].digests == [[expected(0)]]
    assert communicators(generators["a"]) == ["one.1", "one.2"]


def test_a_learner_that_ends_leaves_no_member_in_a_communicator_that_it_has_not_joined(
    fleet: Callable[..., Learner],
) -> None:
    generators = {"a": Generator(), "b": Generator()}
    learner = fleet(generators)

    async def story() -> None:
        learner.serve(*generators)
        await learner.pusher.publish(0)
        await generators["b"].is_asked.wait()
        await learner.pusher.settle()  # its process ends now

    learner.run(story)
    assert [g.digests for g in generators.values()] == [[[expected(0)]]] * 2


@pytest.mark.parametrize(("misfortune", "num_ranks"), [("kill", 1), ("kill", 2), ("stop", 2)])
def test_the_others_get_the_version_in_another_load_when_one_is_lost(
    misfortune: str, num_ranks: int, fleet: Callable[..., Learner], other_rank: OtherRank
) -> None:
    """With two ranks rank 1 sends the tensor in which it is lost."""
    generators = {"a": Generator(), "b": Generator(misfortune=misfortune), "c": Generator()}
    learner = fleet(
        generators, "timeouts.start_s=60"
    )  # the others give up after half of it, which has to do for a busy machine
    learner.others = [other_rank] * (num_ranks - 1)

    async def story() -> None:
        learner.serve(*generators)
        await push(learner, 0, 1, 2)

    learner.run(story)
    survivors = generators["a"], generators["c"]
    assert [g.versions for g in survivors] == [[0, 1, 2]] * 2
    assert [g.digests for g in survivors] == [[[expected(v)] for v in (0, 1, 2)]] * 2
    assert generators["b"].versions == [0]
    assert [e.name for e in learner.cut_off] == (["b"] if misfortune == "stop" else [])


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_of_the_learner_that_is_late_is_named_and_no_generator_is_cut_off(
    late: int,
    fleet: Callable[..., Learner],
    other_rank: OtherRank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It stands still until both have given up."""
    generators = {"a": Generator(), "b": Generator()}
    learner = fleet(generators, "timeouts.start_s=12")
    learner.others = [other_rank]
    send_pieces = SendingRank.send_pieces
    is_seen = threading.Event()

    class Late:
        def __init__(self, block: torch.Tensor) -> None:
            self._block = block

        def __getitem__(self, piece: slice) -> torch.Tensor:
            while not is_seen.is_set() and min(len(g.failures) for g in generators.values()) < 1:
                time.sleep(0.01)
            is_seen.set()
            return self._block[piece]

    def send_late(self: SendingRank, communicator: Any, part: SendPart, block: Any) -> None:
        send_pieces(self, communicator, part, Late(block) if part.rank == late else block)

    monkeypatch.setattr(SendingRank, "send_pieces", send_late)

    async def story() -> None:
        learner.serve(*generators)
        await push(learner, 0)

    learner.run(story)
    assert learner.cut_off == []
    assert [g.digests for g in generators.values()] == [[[expected(0)]]] * 2
    assert [communicators(g) for g in generators.values()] == [["one.1", "one.2"]] * 2
    assert f"rank {late} of the learner: it let the generators wait for" in caplog.text


def gpus(count: int) -> Any:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(
        found < count, reason=f"NCCL needs {count} GPUs for {count} ranks; this machine has {found}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(2 + n)) for n in (1, 2)])
def test_nccl_brings_each_version_bit_for_bit(
    fleet: Callable[..., Learner], num_ranks: int
) -> None:
    generators = {"a": Generator(devices=("cuda:1",)), "b": Generator(devices=("cuda:2",))}
    learner = fleet(generators, "generators.gpus_each=1", "learner.gpus_each=1", device="cuda:0")
    other = OtherRank(torch.device("cuda:3" if num_ranks > 1 else "cpu"), host="127.0.0.1")
    learner.others = [other] * (num_ranks - 1)

    async def story() -> None:
        learner.serve(*generators)
        await push(learner, 0, 1, 2)

    learner.run(story)
    assert [g.digests for g in generators.values()] == [[[expected(v)] for v in (0, 1, 2)]] * 2
    other.close()
    assert {seat.backend for g in generators.values() for seat in g.seats} == {"nccl"}
