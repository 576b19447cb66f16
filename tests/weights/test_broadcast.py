"""How a version is cut for a broadcast, who sits where in a communicator, and who gets weights that
way.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tables import table
from weights_support import (
    CPU,
    MANIFEST,
    SEAT,
    exporter,
    learner_side,
    load,
    member,
    publisher,
    seat_of,
    seats,
)

from async_rl.core.errors import BlockUnreachable, BroadcastBroken
from async_rl.protocol.base import Message
from async_rl.protocol.weights import Difference, Manifest, MapBlock, Mapped, Seat
from async_rl.weights import broadcast, receiving
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.membership import Load
from async_rl.weights.receiving import Receivers, buckets
from async_rl.weights.routes import Route, open_senders
from async_rl.weights.tensors import listed

Make = Callable[..., Broadcaster]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Broadcaster] = []

    def make(*overrides: str, device: str = "cpu", **facts: Any) -> Broadcaster:
        monkeypatch.setattr(broadcast, "device_name", lambda _: device)
        given = ("weights.transfer=collective", *overrides)
        made.append(Broadcaster(learner_side(*given, exporter=exporter(**facts))))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("row", table(__file__, "reached"), ids=str)
def test_auto_broadcasts_to_other_gpus(row: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, learner, devices, is_reached = row
    monkeypatch.setattr(broadcast, "device_name", lambda _: learner)
    senders = open_senders(learner_side(f"weights.transfer={transfer}"))
    assert Route(member(*devices), senders).sender.loads_together is is_reached
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("row", table(__file__, "backends"), ids=str)
async def test_nccl_is_taken_where_every_rank_has_its_own_gpu(row: list[Any], make: Make) -> None:
    learner, devices, backend = row
    one = make("timeouts.start_s=90", device=learner)
    seat = await seat_of(one, load(1), *devices)
    assert (seat.backend, seat.bucket_bytes) == (backend, broadcast.BUCKET_BYTES[backend])
    # Half of timeouts.push_s.
    assert (seat.timeout_s, seat.host) == (15.0, "10.0.0.9")


class OtherRank:
    """A rank of the learner on this machine, or elsewhere if it has no device."""

    def __init__(self, device: str) -> None:
        self.num_calls = 0
        self._device = device

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        assert isinstance(request, MapBlock)
        self.num_calls += 1
        if not self._device:
            raise BlockUnreachable("another machine")
        return Mapped(device=self._device)


@pytest.mark.parametrize("row", table(__file__, "senders"), ids=str)
async def test_ranks_that_can_map_the_block_send_too(row: list[Any], make: Make) -> None:
    learner, member_device, others, num_senders = row
    ranks = [OtherRank(device) for device in others]
    one = make(device=learner, others=ranks)
    for _ in range(2):
        await one.offer(MANIFEST)
    seat = await seat_of(one, load(1), member_device)
    assert (seat.senders, seat.first_rank) == (num_senders, num_senders)
    assert seat.world_size == num_senders + 1
    assert {rank.num_calls for rank in ranks} == {1}


CHANGES: Any = SimpleNamespace(difference=Difference(base=1, manifest=MANIFEST))
CHANGED = SimpleNamespace(changes=CHANGES)
GPUS = {("g", 1): member("GPU-2"), ("h", 2): member("GPU-3")}


async def differences(one: Broadcaster, new: Load) -> set[int | None]:
    given = await seats(one, new, {life: GPUS[life] for life in new.members})
    return {seat.difference and seat.difference.base for seat in given.values()}


async def test_members_that_all_have_the_version_before_get_changes(make: Make) -> None:
    one = make(device="GPU-1", block=CHANGED)
    assert not one.compares, "nothing was sent over NCCL"
    assert await differences(one, load(1, *GPUS)) == {None}
    assert one.compares
    assert await differences(one, load(2, *GPUS)) == {1}
    # One member left, then both load again.
    assert await differences(one, load(3, ("g", 1))) == {None}
    assert await differences(one, load(4, *GPUS)) == {None}
    # What both have is not the version that was compared.
    assert await differences(one, load(5, *GPUS, version=2)) == {1}
    assert await differences(one, load(6, *GPUS)) == {None}
    over_gloo = make(block=CHANGED)
    for number in (1, 2):
        assert (await seat_of(over_gloo, load(number, ("g", 1)))).difference is None
    assert not over_gloo.compares


def test_only_an_engine_of_the_version_before_gets_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    pieces: list[torch.Tensor] = []

    def join(seat: Seat, rank: int, device: torch.device) -> Any:
        did.append(f"join as {rank}")
        return SimpleNamespace(device=device, close=lambda: did.append("leave"))

    def begin(_: object, flat: torch.Tensor, sender: int, **__: float) -> Callable[[], Any]:
        piece = pieces.pop(0)
        return lambda: flat.copy_(piece)

    monkeypatch.setattr(receiving, "join", join)
    monkeypatch.setattr(receiving, "begin", begin)
    new = [torch.randn(5_000).bfloat16(), torch.randn(300).bfloat16()]
    old = [tensor.clone() for tensor in new]
    receivers = Receivers(0, CPU)
    with publisher(old) as block:

        def received(manifest: Manifest, content: torch.Tensor, seat: Seat) -> Any:
            sent = manifest if seat.difference is None else seat.difference.manifest
            for bucket in buckets(sent, seat.bucket_bytes):
                pieces.extend(content[bucket.begin : bucket.end].clone().split(seat.bucket_bytes))
            with receivers.receive(manifest, seat, takes_changes=True) as tensors:
                return dict(tensors)

        received(block.write(1, new), block.content, SEAT)
        for tensor in new:
            tensor[7:30] = 1
        after = block.write(2, new, compares=True)
        changes = block.changes
        assert changes is not None
        seat = replace(SEAT, difference=changes.difference)
        lists = received(after, changes.content, seat)
        for number, tensor in enumerate(old):
            positions, words = listed(lists[str(number)], len(tensor))
            tensor.view(torch.int16)[positions] = words
            assert torch.equal(tensor, new[number])
        # It has version 2 now, which is not the one that changed.
        with pytest.raises(BroadcastBroken, match="takes no changes from version 1"):
            received(after, changes.content, seat)
    assert pieces == [], "it took part"
    assert did == ["join as 1", "leave"]
