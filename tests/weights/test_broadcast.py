"""How a version is cut for a broadcast, who sits where in a communicator, and who gets weights that
way.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from weights_support import (
    CPU,
    MANIFEST,
    SEAT,
    exporter,
    learner_side,
    load,
    member,
    seat_of,
    seats,
)

from async_rl.core.errors import (
    BlockUnreachable,
    BroadcastBroken,
    SenderLate,
    Unavailable,
    WeightsError,
)
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import (
    Difference,
    MapBlock,
    Mapped,
    SendPart,
    TensorEntry,
)
from async_rl.weights import broadcast, receiving, sending
from async_rl.weights.block import SharedTensors
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.membership import Load
from async_rl.weights.outgoing import senders
from async_rl.weights.routes import Route, open_senders
from async_rl.weights.tensors import tensor_of, tensor_spec


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [("int8", [8], "dtype int8"), ("float32", [3], "does not fit 8 bytes")],
)
def test_a_tensor_that_does_not_fit_its_announcement_is_refused(
    dtype: str, shape: list[int], said: str
) -> None:
    entry = TensorEntry(name="w", dtype=dtype, shape=shape, offset=0, size_bytes=8)
    with pytest.raises(WeightsError, match=said):
        tensor_of(entry, torch.zeros(8, dtype=torch.uint8))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Broadcaster]]:
    made: list[Broadcaster] = []

    def make(*overrides: str, device: str = "cpu", **facts: Any) -> Broadcaster:
        monkeypatch.setattr(broadcast, "device_name", lambda _: device)
        given = ("weights.transfer=collective", *overrides)
        made.append(Broadcaster(learner_side(*given, exporter=exporter(**facts))))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("transfer", "learner", "devices", "is_reached"),
    [
        ("collective", "cpu", ["cpu"], True),
        ("shared_memory", "GPU-1", ["GPU-2"], False),
        ("filesystem", "GPU-1", ["GPU-2"], False),
        ("auto", "cpu", ["cpu"], False),
        ("auto", "GPU-1", ["GPU-2", "GPU-3"], True),
        ("auto", "GPU-1", ["GPU-1"], False),
        ("auto", "GPU-1", ["cpu"], False),
        ("auto", "cpu", ["GPU-1"], False),
    ],
)
def test_auto_broadcasts_between_gpus_that_are_not_shared(
    transfer: str,
    learner: str,
    devices: list[str],
    is_reached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "device_name", lambda _: learner)
    senders = open_senders(learner_side(f"weights.transfer={transfer}"))
    assert Route(member(*devices), senders).sender.loads_together is is_reached
    for sender in senders:
        sender.close()


@pytest.mark.parametrize(
    ("learner", "devices", "backend"),
    [
        ("cpu", ["cpu"], "gloo"),
        ("GPU-1", ["GPU-2", "GPU-3"], "nccl"),
        ("GPU-1", ["GPU-2", "GPU-2"], "gloo"),
        ("GPU-1", ["GPU-1"], "gloo"),
    ],
)
async def test_nccl_is_taken_where_every_rank_has_a_gpu_of_its_own_and_a_seat_has_all_limits(
    learner: str, devices: list[str], backend: str, make: Callable[..., Broadcaster]
) -> None:
    one = make("timeouts.start_s=90", device=learner)
    seat = await seat_of(one, load(1), *devices)
    assert (seat.backend, seat.bucket_bytes) == (backend, broadcast.BUCKET_BYTES[backend])
    # Half of timeouts.push_s.
    assert (seat.timeout_s, seat.host) == (15.0, "10.0.0.9")


async def test_each_rank_follows_the_previous_and_only_whole_loads_of_the_same_lives_share_a_name(
    make: Callable[..., Broadcaster],
) -> None:
    one = make()
    sizes = {("g", 1): 2, ("h", 2): 1, ("i", 3): 3}
    members = {life: member(*["cpu"] * size) for life, size in sizes.items()}

    async def names(new: Load) -> set[str]:
        return {seat.communicator for seat in (await seats(one, new, members)).values()}

    first = load(4, *members)
    found = await seats(one, first, members)
    assert [(s.first_rank, s.world_size) for s in found.values()] == [(1, 7), (3, 7), (4, 7)]
    assert {seat.communicator for seat in found.values()} == {"L.4"}
    second = load(5, *members)
    assert await names(second) == {"L.4"}
    with pytest.raises(BroadcastBroken, match="load 4 has ended"):
        await one.source(MANIFEST, first, ("g", 1))
    second.gave_up.add(("h", 2))
    assert await names(load(6, *members)) == {"L.6"}
    del members["h", 2]
    assert await names(load(7, *members)) == {"L.7"}


class OtherRank:
    """A rank of the learner on this machine, or elsewhere if it has no device."""

    def __init__(self, device: str, *, fault: Exception | None = None) -> None:
        self.did: list[str] = []
        self.is_told = asyncio.Event()
        self._device = device
        self._fault = fault

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        self.did.append(type(request).__name__)
        if isinstance(request, MapBlock):
            if not self._device:
                raise BlockUnreachable("another machine")
            return Mapped(device=self._device)
        if isinstance(request, SendPart):
            if isinstance(self._fault, TimeoutError):
                await asyncio.Event().wait()
            if self._fault is not None:
                raise self._fault
            await self.is_told.wait()
            raise BroadcastBroken("rank 1 gave up")
        self.is_told.set()
        return Ok()


@pytest.mark.parametrize(
    ("transfer", "learner", "member_device", "others", "num_senders"),
    [
        ("collective", "cpu", "cpu", ["cpu", "", "cpu"], 3),
        ("auto", "GPU-1", "GPU-4", ["GPU-2", "", "GPU-3"], 3),
        # NCCL takes a GPU once.
        ("auto", "GPU-1", "GPU-3", ["GPU-2", "GPU-3"], 2),
    ],
)
async def test_ranks_that_can_map_the_block_send_too_and_take_the_first_seats(
    transfer: str,
    learner: str,
    member_device: str,
    others: list[str],
    num_senders: int,
    make: Callable[..., Broadcaster],
) -> None:
    ranks = [OtherRank(device) for device in others]
    one = make(f"weights.transfer={transfer}", device=learner, others=ranks)
    for _ in range(2):
        await one.offer(MANIFEST)
    seat = await seat_of(one, load(1), member_device)
    assert (seat.senders, seat.first_rank) == (num_senders, num_senders)
    assert seat.world_size == num_senders + 1
    assert {len(rank.did) for rank in ranks} == {1}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (SenderLate("it let the generators wait"), "rank 1 of the learner: it let"),
        (Unavailable("no answer"), "rank 1 of the learner: no answer"),
        (TimeoutError(), "rank 1 of the learner: it does not answer"),
        (BroadcastBroken("a rank is lost"), ""),
        (None, ""),
    ],
)
async def test_all_ranks_give_up_if_one_fails_and_a_late_one_is_named(
    fault: Exception | None,
    expected: str,
    make: Callable[..., Broadcaster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 itself is lost in each case."""
    monkeypatch.setattr(receiving, "join", lose)
    other = OtherRank("cpu", fault=fault)
    one = make("timeouts.start_s=0.6", others=[other])
    await one.offer(MANIFEST)
    patience_s = (await seat_of(one, load(1))).timeout_s
    with pytest.raises(BroadcastBroken, match=expected or "a rank is lost") as found:
        await one.send(MANIFEST)
    assert isinstance(found.value, SenderLate) is bool(expected)
    assert other.did == ["MapBlock", "SendPart", "StopSending"]
    # Twice as long, where it was late.
    after = await seat_of(one, load(2))
    assert after.timeout_s == patience_s * (2 if expected else 1)


CHANGES: Any = SimpleNamespace(difference=Difference(base=1, manifest=MANIFEST))
CHANGED = SimpleNamespace(changes=CHANGES)
GPUS = {("g", 1): member("GPU-2"), ("h", 2): member("GPU-3")}


def test_all_ranks_send_in_turn_and_rank_0_alone_what_changed() -> None:
    seat = replace(SEAT, senders=3)
    changed = replace(seat, difference=CHANGES.difference)
    assert list(itertools.islice(senders(seat), 4)) == [0, 1, 2, 0]
    assert list(itertools.islice(senders(changed), 4)) == [0] * 4


async def differences(one: Broadcaster, new: Load) -> set[int | None]:
    given = await seats(one, new, {life: GPUS[life] for life in new.members})
    return {seat.difference and seat.difference.base for seat in given.values()}


async def test_members_that_all_have_the_version_that_changed_get_the_changes(
    make: Callable[..., Broadcaster],
) -> None:
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


@pytest.mark.parametrize("has_lost", [False, True])
async def test_an_engine_that_cannot_change_words_ends_the_changes_and_a_lost_member_does_not(
    has_lost: bool, make: Callable[..., Broadcaster]
) -> None:
    one = make(device="GPU-1", block=CHANGED)
    await differences(one, load(1, *GPUS))
    broken = load(2, *GPUS)
    assert await differences(one, broken) == {1}
    broken.gave_up.add(("h", 2))
    broken.has_lost = has_lost
    assert await differences(one, load(3, ("h", 2))) == {None}
    assert one.compares is has_lost


async def test_a_sender_that_is_late_is_named_and_the_next_load_waits_for_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "join", lose)
    now_s = 1000.0
    given = ("weights.transfer=collective", "timeouts.start_s=60")
    one = Broadcaster(learner_side(*given), lambda: now_s)
    found = []
    for number, late_s in enumerate((5.0, 40.0, 0.0, 0.0), 1):
        new = load(number)
        waits_s = (await seat_of(one, new)).timeout_s
        now_s += late_s
        with pytest.raises(BroadcastBroken) as raised:
            await one.send(MANIFEST)
        found.append((waits_s, raised.type is SenderLate))
        with pytest.raises(BroadcastBroken, match=f"load {number} has ended"):
            await one.source(MANIFEST, new, ("g", 1))
    one.close()
    assert found == [(10.0, False), (10.0, True), (80.0, False), (10.0, False)]


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_sender_is_closed_while_a_load_hangs_and_a_broadcast_ends_with_it(
    is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        has_begun.set()
        assert may_end.wait(30), "the sender was not closed before"
        lose()

    group = SimpleNamespace(device=CPU, cancel=may_end.set, close=list)
    monkeypatch.setattr(receiving, "join", (lambda *_: group) if is_connected else hang)
    monkeypatch.setattr(sending, "begin", hang)
    one = Broadcaster(learner_side("weights.transfer=collective"))
    await seat_of(one, load(1))
    with SharedTensors([tensor_spec("w", torch.empty(2))]) as block:
        manifest = block.write(1, [torch.zeros(2)])
        task = asyncio.create_task(one.send(manifest))
        await asyncio.to_thread(has_begun.wait)
        second = load(2, ("h", 1))
        await seats(one, second, {("h", 1): member("cpu")})
        one.close()
        if not is_connected:
            may_end.set()
        with pytest.raises(BroadcastBroken):
            await task
        assert (await one.source(manifest, second, ("h", 1))).communicator == "L.2"


def lose(*_: object) -> None:
    raise BroadcastBroken("a rank is lost")
