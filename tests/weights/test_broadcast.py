"""How a version is cut for a broadcast, who sits where in a communicator, and who gets weights that
way.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from weights_support import MANIFEST, exporter, learner_side, load, member, seat_of, seats

from async_rl.core.errors import BlockUnreachable
from async_rl.protocol.base import Message
from async_rl.protocol.weights import Difference, MapBlock, Mapped
from async_rl.weights import broadcast
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.membership import Load
from async_rl.weights.routes import Route, open_senders


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
        ("auto", "cpu", ["cpu"], False),
        ("auto", "GPU-1", ["GPU-2", "GPU-3"], True),
        ("auto", "GPU-1", ["GPU-1"], False),
        ("auto", "GPU-1", ["cpu"], False),
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
    assert {rank.num_calls for rank in ranks} == {1}


CHANGES: Any = SimpleNamespace(difference=Difference(base=1, manifest=MANIFEST))
CHANGED = SimpleNamespace(changes=CHANGES)
GPUS = {("g", 1): member("GPU-2"), ("h", 2): member("GPU-3")}


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
