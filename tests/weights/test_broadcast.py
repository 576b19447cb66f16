"""How a version is cut for a broadcast, who sits where in a communicator, and who gets weights that
way.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from composing import compose, compose_unchecked
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.run import RunConfig
from async_rl.core.errors import (
    BlockUnreachable,
    BroadcastBroken,
    SenderLate,
    Unavailable,
    WeightsError,
)
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import (
    SHARED_BLOCK,
    Difference,
    Manifest,
    MapBlock,
    Mapped,
    Seat,
    SendPart,
    TensorEntry,
)
from async_rl.weights import broadcast, receiving, sending
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.media import LearnerSide
from async_rl.weights.membership import Life, Load
from async_rl.weights.outgoing import buckets, senders
from async_rl.weights.routes import Receivers, Route, open_senders
from async_rl.weights.tensors import layout, tensor_of, tensor_spec, word_sum


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), bucket_bytes=st.integers(1, 900)
)
def test_buckets_hold_each_tensor_once_and_no_more_than_fits_unless_one_alone_does_not(
    sizes: list[int], bucket_bytes: int
) -> None:
    specs = [
        tensor_spec(f"t{i}", torch.empty(size, dtype=torch.bfloat16))
        for i, size in enumerate(sizes)
    ]
    block = SharedTensors(specs)
    data = [
        np.random.default_rng(i).integers(0, 256, 2 * size, dtype=np.uint8)
        for i, size in enumerate(sizes)
    ]
    manifest = block.write(1, map(torch.from_numpy, data))
    pieces = buckets(manifest, bucket_bytes)
    for piece, following in itertools.pairwise(pieces):
        ends = [*(entry.offset for entry in following.entries[1:]), following.end]
        assert ends[0] - piece.begin > bucket_bytes, "its first tensor would have fitted"
    found, total = [], 0
    with SharedTensorsReader(manifest) as reader:
        for piece in pieces:
            assert piece.size_bytes <= bucket_bytes or len(piece.entries) == 1
            flat = reader.content[piece.begin : piece.end].clone()
            total += int(word_sum(flat))
            found += [
                (name, tensor.view(torch.uint8).tolist()) for name, tensor in piece.tensors(flat)
            ]
    assert found == [(f"t{i}", array.tolist()) for i, array in enumerate(data)]
    assert total % 2**64 == manifest.checksum
    block.close()


def test_a_tensor_that_does_not_fit_its_announcement_is_refused() -> None:
    for dtype, shape, said in (
        ("int8", [8], "dtype int8"),
        ("float32", [3], "does not fit 8 bytes"),
    ):
        entry = TensorEntry(name="w", dtype=dtype, shape=shape, offset=0, size_bytes=8)
        with pytest.raises(WeightsError, match=said):
            tensor_of(entry, torch.zeros(8, dtype=torch.uint8))


def learner_side(config: RunConfig, others: Sequence[Any] = ()) -> LearnerSide:
    exporter: Any = SimpleNamespace(
        block=SimpleNamespace(changes=None, content=torch.zeros(0)), others=others
    )
    return LearnerSide(
        config=config.weights,
        folder="memory://weights",
        life="L",
        host="127.0.0.1",
        device=torch.device("cpu"),
        exporter=exporter,
        push_s=config.timeouts.push_s,
    )


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost before all have met."""
    monkeypatch.setattr(receiving, "join", lose)


MANIFEST = Manifest(version=1, path="", tensors=[], total_bytes=0, checksum=0)


def member(*devices: str) -> Member:
    address = "tcp://10.0.0.9:1"
    return Member(
        name="g",
        role="generator",
        pid=1,
        address=address,
        state="",
        since_s=0.0,
        devices=list(devices),
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Broadcaster]]:
    made: list[Broadcaster] = []

    def make(*overrides: str, device: str = "cpu", others: Sequence[Any] = ()) -> Broadcaster:
        monkeypatch.setattr(broadcast, "device_name", lambda _: device)
        config = compose("grpo_code", ["generators.gpus_each=1", "learner.gpus_each=1", *overrides])
        made.append(Broadcaster(learner_side(config, others)))
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
    config = compose_unchecked("grpo_code", [f"weights.transfer={transfer}"])
    senders = open_senders(learner_side(config))
    assert Route(member(*devices), senders).sender.loads_together is is_reached
    for sender in senders:
        sender.close()


@pytest.mark.parametrize(
    ("learner", "devices", "expected"),
    [
        ("cpu", ["cpu"], "gloo"),
        ("GPU-1", ["GPU-2", "GPU-3"], "nccl"),
        ("GPU-1", ["GPU-2", "GPU-2"], "gloo"),
        ("GPU-1", ["GPU-1"], "gloo"),
        ("GPU-1", ["GPU-2"], "nccl"),
    ],
)
async def test_nccl_is_taken_where_every_rank_has_a_gpu_of_its_own(
    learner: str, devices: list[str], expected: str, make: Callable[..., Broadcaster]
) -> None:
    one = make("weights.transfer=collective", device=learner)
    assert (await seats(one, load(1), {("g", 1): member(*devices)}))["g", 1].backend == expected


@pytest.mark.parametrize("deadline_s", [10, 60])
async def test_a_seat_says_how_much_is_sent_at_once_and_when_to_give_up(
    deadline_s: int, make: Callable[..., Broadcaster]
) -> None:
    one = make("weights.transfer=collective", f"timeouts.start_s={3 * deadline_s}")
    seat = (await seats(one, load(1), {("g", 1): member("cpu")}))["g", 1]
    assert (seat.bucket_bytes, seat.timeout_s, seat.host) == (
        broadcast.BUCKET_BYTES["gloo"],
        deadline_s / 2,
        "10.0.0.9",
    )


async def test_each_rank_follows_the_previous_and_only_whole_loads_of_the_same_lives_share_a_name(
    make: Callable[..., Broadcaster],
) -> None:
    one = make("weights.transfer=collective")
    members = {
        ("g", 1): member("cpu", "cpu"),
        ("h", 2): member("cpu"),
        ("i", 3): member("cpu", "cpu", "cpu"),
    }

    async def names(new: Load) -> set[str]:
        return {seat.communicator for seat in (await seats(one, new, members)).values()}

    first = await seats(one, load(4, *members), members)
    assert [(s.first_rank, s.world_size, s.communicator) for s in first.values()] == [
        (1, 7, "L.4"),
        (3, 7, "L.4"),
        (4, 7, "L.4"),
    ]
    second = load(5, *members)
    assert await names(second) == {"L.4"}
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
    given = await seats(one, load(1), {("g", 1): member(member_device)})
    seat = given["g", 1]
    assert (seat.senders, seat.first_rank, seat.world_size) == (
        num_senders,
        num_senders,
        num_senders + 1,
    )
    assert {len(rank.did) for rank in ranks} == {1}


def test_all_ranks_send_in_turn_and_rank_0_alone_what_changed() -> None:
    seat = msgspec.structs.replace(SEAT, senders=3)
    changed = msgspec.structs.replace(seat, difference=CHANGES.difference)
    assert list(itertools.islice(senders(seat), 4)) == [0, 1, 2, 0]
    assert list(itertools.islice(senders(changed), 4)) == [0] * 4


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
    fault: Exception | None, expected: str, make: Callable[..., Broadcaster], lost: None
) -> None:
    """Rank 0 itself is lost in each case."""
    other = OtherRank("cpu", fault=fault)
    one = make("weights.transfer=collective", "timeouts.start_s=6", others=[other])
    await one.offer(MANIFEST)
    patience_s = (await seats(one, load(1), {("g", 1): member("cpu")}))["g", 1].timeout_s
    with pytest.raises(BroadcastBroken, match=expected or "a rank is lost") as found:
        await one.send(MANIFEST)
    assert isinstance(found.value, SenderLate) is bool(expected)
    assert other.did == ["MapBlock", "SendPart", "StopSending"]
    # Twice as long, where it was late.
    after = (await seats(one, load(2), {("g", 1): member("cpu")}))["g", 1]
    assert after.timeout_s == patience_s * (2 if expected else 1)


CHANGES: Any = SimpleNamespace(difference=Difference(base=1, manifest=MANIFEST))
GPUS = {("g", 1): member("GPU-2"), ("h", 2): member("GPU-3")}


async def differences(one: Broadcaster, new: Load) -> set[int | None]:
    given = await seats(one, new, {life: GPUS[life] for life in new.members})
    return {seat.difference and seat.difference.base for seat in given.values()}


async def test_members_that_all_have_the_version_that_changed_get_the_changes(
    make: Callable[..., Broadcaster],
) -> None:
    one = make("weights.transfer=collective", device="GPU-1")
    assert not one.compares, "nothing was sent over NCCL"
    one._learner.exporter.block.changes = CHANGES
    assert await differences(one, load(1, *GPUS)) == {None}
    assert one.compares
    assert await differences(one, load(2, *GPUS)) == {1}
    # One member left, then both load again.
    assert await differences(one, load(3, ("g", 1))) == {None}
    assert await differences(one, load(4, *GPUS)) == {None}
    # What both have is not the version that was compared.
    skipped = load(5, *GPUS)
    skipped.version = 2
    assert await differences(one, skipped) == {1}
    assert await differences(one, load(6, *GPUS)) == {None}


@pytest.mark.parametrize("has_lost", [False, True])
async def test_an_engine_that_cannot_change_words_ends_the_changes_and_a_lost_member_does_not(
    has_lost: bool, make: Callable[..., Broadcaster]
) -> None:
    one = make("weights.transfer=collective", device="GPU-1")
    one._learner.exporter.block.changes = CHANGES
    await differences(one, load(1, *GPUS))
    broken = load(2, *GPUS)
    assert await differences(one, broken) == {1}
    broken.gave_up.add(("h", 2))
    broken.has_lost = has_lost
    assert await differences(one, load(3, ("h", 2))) == {None}
    assert one.compares is has_lost


async def test_over_gloo_all_tensors_are_sent(make: Callable[..., Broadcaster]) -> None:
    one = make("weights.transfer=collective")
    one._learner.exporter.block.changes = CHANGES
    for number in (1, 2):
        given = await seats(one, load(number, ("g", 1)), {("g", 1): member("cpu")})
        assert given["g", 1].difference is None
    assert not one.compares


async def test_a_member_of_a_load_that_has_ended_gets_no_seat_of_the_next_one(
    make: Callable[..., Broadcaster],
) -> None:
    one = make("weights.transfer=collective")
    first = load(1, ("g", 1))
    await seats(one, first, {("g", 1): member("cpu")})
    await seats(one, load(2, ("h", 2)), {("h", 2): member("cpu")})
    with pytest.raises(BroadcastBroken, match="load 1 has ended"):
        await one.source(MANIFEST, first, ("g", 1))


async def test_a_sender_that_is_late_is_named_and_the_next_load_waits_for_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = []

    def lose_noted(seat: Seat, *_: object) -> None:
        names.append(seat.communicator)
        lose()

    monkeypatch.setattr(receiving, "join", lose_noted)
    config = compose("grpo_code", ["weights.transfer=collective", "timeouts.start_s=60"])
    now_s = 1000.0
    one = Broadcaster(learner_side(config), lambda: now_s)
    found = []
    for number, late_s in enumerate((5.0, 40.0, 0.0, 0.0), 1):
        life, new = ("g", number), load(number)
        waits_s = (await seats(one, new, {life: member("cpu")}))[life].timeout_s
        now_s += late_s
        with pytest.raises(BroadcastBroken) as raised:
            await one.send(MANIFEST)
        found.append((waits_s, raised.type))
        with pytest.raises(BroadcastBroken, match=f"load {number} has ended"):
            await one.source(MANIFEST, new, life)
    one.close()
    assert found == [
        (10.0, BroadcastBroken),
        (10.0, SenderLate),
        (80.0, BroadcastBroken),
        (10.0, BroadcastBroken),
    ]
    assert names == ["L.1", "L.2", "L.3", "L.4"]


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_sender_is_closed_while_a_load_hangs_and_a_broadcast_ends_with_it(
    is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        has_begun.set()
        assert may_end.wait(30), "the sender was not closed before"
        lose()

    group = SimpleNamespace(device=torch.device("cpu"), cancel=may_end.set, close=list)
    monkeypatch.setattr(receiving, "join", (lambda *_: group) if is_connected else hang)
    monkeypatch.setattr(sending, "begin", hang)
    one = Broadcaster(learner_side(compose("grpo_code", ["weights.transfer=collective"])))
    await seats(one, load(1), {("g", 1): member("cpu")})
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


def test_a_receiver_closes_a_communicator_before_it_joins_another_one_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did = []

    def join(seat: Seat, rank: int, device: torch.device) -> Any:
        did.append(f"join {seat.communicator} as {rank}")
        leave = functools.partial(did.append, f"leave {seat.communicator}")
        return SimpleNamespace(device=device, close=leave)

    monkeypatch.setattr(receiving, "join", join)
    # Kept, so that no other buffer has the address of one.
    pieces: list[torch.Tensor] = []

    def begin(_: object, flat: torch.Tensor, sender: int, *, timeout_s: float) -> Callable[[], Any]:
        pieces.append(flat)
        return functools.partial(flat.fill_, 255)

    monkeypatch.setattr(receiving, "begin", begin)
    receivers = Receivers(1, torch.device("cpu"))
    entries, total_bytes = layout([tensor_spec("w", torch.empty(2))])
    manifest = msgspec.structs.replace(
        MANIFEST,
        tensors=entries,
        total_bytes=total_bytes,
        checksum=(entries[0].offset - total_bytes) // 8 % 2**64,
    )
    for name in ("one", "one", "two"):
        seat = msgspec.structs.replace(SEAT, communicator=name)
        with receivers.receive(manifest, seat) as tensors:
            assert [tensor.view(torch.int32).tolist() for _, tensor in tensors] == [[-1, -1]]
    assert len({piece.data_ptr() for piece in pieces}) == 1, "the buffer stays"
    block = SharedTensors([tensor_spec("w", torch.empty(2))])
    manifest = block.write(1, map(torch.from_numpy, [np.full(8, 255, np.uint8)]))
    with receivers.receive(manifest, SHARED_BLOCK) as tensors:
        assert [tensor.view(torch.int32).tolist() for _, tensor in tensors] == [[-1, -1]]
    block.close()
    receivers.close()
    assert did == ["join one as 4", "leave one", "join two as 4", "leave two"]


def lose(*_: object) -> None:
    raise BroadcastBroken("a rank is lost")


SEAT = Seat(
    communicator="one",
    backend="gloo",
    store="",
    secret="",
    host="",
    world_size=5,
    first_rank=3,
    bucket_bytes=64,
    timeout_s=1.0,
)


async def seats(one: Broadcaster, new: Load, members: dict[Life, Member]) -> dict[Life, Seat]:
    named = [
        msgspec.structs.replace(member, name=name, pid=pid)
        for (name, pid), member in members.items()
    ]
    one.join(new, named)
    return {life: await one.source(MANIFEST, new, life) for life in members}


def load(number: int, *lives: Life) -> Load:
    return Load(number=number, version=1, members=frozenset(lives), missing=set())
