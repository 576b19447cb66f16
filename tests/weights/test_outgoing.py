"""The learner's end of a broadcast over NCCL: what its GPU is asked for, in which order and on
which stream. A recorder stands for torch.cuda, and the GPU's memory has no content (device "meta").
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weights_support import MEMBER, exporter, learner_side, load, seat_of

from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.weights import broadcast, receiving, sending
from async_rl.weights.block import SharedTensors
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.membership import Membership, life_of
from async_rl.weights.outgoing import Outgoing
from async_rl.weights.tensors import tensor_spec

GPU = torch.device("meta")


class Recorder(TorchDispatchMode):
    """torch.cuda and NCCL. Copies are recorded while it is entered, in this thread."""

    device = GPU

    def __init__(self) -> None:
        super().__init__()
        self.did: list[tuple[Any, ...]] = []
        self.copies_hang = self.sends_hang = False
        self._current = "default"
        self._num_sent = 0
        self.senders: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source, *non_blocking = args
            self.did.append((f"{source.device.type} to {target.device.type}", *non_blocking))
        return func(*args, **(kwargs or {}))

    def Stream(self, device: torch.device, priority: int) -> str:
        return f"own of {device}, {priority}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, device: torch.device) -> str:
        return self._current

    def Event(self) -> Recorder:
        return self

    def record(self, stream: str) -> None:
        self.did.append(("event", stream))

    def query(self) -> bool:
        return not self.copies_hang

    def begin(self, flat: torch.Tensor, sender: int, *, timeout_s: float) -> Callable[[], None]:
        self._num_sent += 1
        self.senders.append(sender)
        self.did.append(("begin", self._num_sent, flat.numel(), self._current))
        return partial(self._finish, self._num_sent)

    def _finish(self, number: int) -> None:
        if self.sends_hang:
            raise RuntimeError("rank 0 waited")
        self.did.append(("finish", number, self._current))

    def cancel(self) -> None:
        self.did.append(("cancel",))

    def close(self) -> None:
        self.did.append(("close",))


OWN = "own of meta, -1"


def test_a_piece_is_copied_without_blocking_on_a_stream_that_training_does_not_fill() -> None:
    recorder = Recorder()
    outgoing = Outgoing(GPU, piece_bytes=100, cuda=recorder)
    with recorder, outgoing.in_use():
        pieces = [outgoing.stage(torch.zeros(size, dtype=torch.uint8)) for size in (100, 100, 70)]
    assert [len(piece) for piece in pieces] == [100, 100, 70]
    # True: the copy to the GPU does not block this thread.
    assert recorder.did == 3 * [("cpu to meta", True), ("event", OWN)]
    first, second, third = (piece._base for piece in pieces)
    assert first is third is not second


LIFE = life_of(MEMBER)


class Learner:
    """Sends one tensor of 1,000 bytes in pieces of 400. The clock counts its own readings."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.exporter = exporter()
        given = learner_side("weights.transfer=collective", device=GPU, exporter=self.exporter)
        self.now_s = 0.0
        self.tick_s = 0.0
        self.sender = Broadcaster(given, self._clock)
        self.called_off: list[str] = []
        self._num_loads = 0

    def rendezvous(self, _: str) -> Any:
        given = {"open": len, "call_off": self.called_off.append, "close": list}
        return SimpleNamespace(address="", secret="", **given)

    def _clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    async def send(self) -> None:
        with SharedTensors([tensor_spec("t", torch.zeros(250))]) as block:
            self.exporter.block.content = block.content[:-124]
            await self.sender.send(block.write(1, [torch.zeros(250)]))

    async def join(self) -> float:
        """Start a load, which `load` is from now on; returns how long its member waits."""
        self._num_loads += 1
        self.load = load(self._num_loads, LIFE)
        self.seat = await seat_of(self.sender, self.load, "GPU-2")
        assert (self.seat.backend, self.seat.bucket_bytes) == ("nccl", 400)
        return float(self.seat.timeout_s)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Learner]:
    monkeypatch.setattr(broadcast, "device_name", lambda _: "GPU-1")
    monkeypatch.setitem(broadcast.BUCKET_BYTES, "nccl", 400)
    before = set(threading.enumerate())
    learner = Learner()
    monkeypatch.setattr(broadcast, "Rendezvous", learner.rendezvous)
    monkeypatch.setattr(receiving, "join", lambda *_: learner.recorder)

    def outgoing(device: torch.device, *, piece_bytes: int) -> Outgoing:
        assert piece_bytes == 400, "no more of the GPU than a piece takes"
        return Outgoing(device, piece_bytes=piece_bytes, cuda=learner.recorder)

    monkeypatch.setattr(sending, "Outgoing", outgoing)
    yield learner
    did = learner.recorder.did
    is_connected = ("close",) not in did
    learner.sender.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert did[-1] == ("close",)
    assert ("cancel",) in did or not is_connected


async def test_the_next_piece_is_copied_while_nccl_sends_one_and_gets_buffers_that_are_free(
    learner: Learner,
) -> None:
    await learner.join()
    await learner.send()
    copied = ("event", OWN)
    # The page-locked bytes of the writer, 124 less than the block has.
    assert learner.recorder.did == [
        copied,
        ("begin", 1, 400, OWN),
        copied,
        ("begin", 2, 400, OWN),
        ("finish", 1, OWN),
        copied,
        ("begin", 3, 100, OWN),
        ("finish", 2, OWN),
        ("finish", 3, OWN),
    ]


async def test_members_of_the_version_before_are_sent_the_lists_of_what_changed(
    learner: Learner,
) -> None:
    await learner.join()
    tensors = [torch.zeros(500).bfloat16(), torch.zeros(20).bfloat16()]
    with SharedTensors([tensor_spec(str(i), tensor) for i, tensor in enumerate(tensors)]) as block:
        learner.exporter.block.content = block.content
        await learner.sender.send(block.write(1, tensors))
        tensors[0][7:127] = 1
        manifest = block.write(2, tensors, compares=learner.sender.compares)
        learner.exporter.block.changes = block.changes
        # The block itself is not read again.
        learner.exporter.block.content = block.content[:0]
        learner.recorder.did.clear()
        await learner.join()
        await learner.sender.send(manifest)
    # Four bytes for each of 120 words, the first and the last: 488, filled up to 512; then a list
    # of two words, filled up to 64.
    sizes = [size for what, _, size, *_ in filter(is_begin, learner.recorder.did)]
    assert sizes == [400, 112, 64]
    learner.load.gave_up.add(LIFE)
    await learner.join()
    assert not learner.sender.compares, "its engine could not take them"


def is_begin(did: tuple[Any, ...]) -> bool:
    return did[0] == "begin"


@pytest.mark.parametrize("is_copying", [False, True])
async def test_a_copy_that_hangs_is_the_learners_fault_and_no_members(
    is_copying: bool, learner: Learner
) -> None:
    learner.recorder.sends_hang = True
    learner.recorder.copies_hang = is_copying
    patience_s = await learner.join()
    said = "rank 0 of the learner: it let" if is_copying else "rank 0 waited"
    with pytest.raises(BroadcastBroken, match=said) as found:
        await learner.send()
    assert isinstance(found.value, SenderLate) is is_copying
    assert learner.recorder.did[-1] == ("close",)
    assert await learner.join() == (2 * patience_s if is_copying else patience_s)


async def test_members_wait_in_proportion_to_the_slowest_piece_of_the_last_load(
    learner: Learner,
) -> None:
    assert await learner.join() == 30.0
    learner.tick_s = 5.0
    await learner.send()
    learner.tick_s = 0.0
    patience_s = await learner.join()
    # Each piece takes a few readings of the clock, so at least 5 s.
    assert patience_s > 30.0
    assert patience_s % (4 * 5.0) == 0
    await learner.send()
    assert await learner.join() == 30.0, "the slow load is forgotten"


@pytest.mark.parametrize(("has_lost", "is_sending"), [(True, True), (True, False), (False, True)])
async def test_a_lost_member_ends_a_broadcast_that_waits_for_it_and_no_sent_one(
    has_lost: bool, is_sending: bool, learner: Learner
) -> None:
    await learner.sender.leave(Membership())
    await learner.join()
    await learner.send()
    learner.load.has_lost = has_lost
    learner.load.awaits_sender = is_sending
    learner.recorder.did.clear()
    await learner.sender.leave(Membership())
    assert learner.recorder.did == [("cancel",)] * (has_lost and is_sending)
    assert learner.called_off == ["L.1"] * has_lost
