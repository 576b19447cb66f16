"""The learner's end of a broadcast over NCCL: what its GPU is asked for, in which order and on
which stream. A recorder stands for torch.cuda, and the GPU's memory has no content (device "meta").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weights_support import MEMBER, exporter, learner_side, load, seat_of

from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.weights import broadcast, receiving, sending
from async_rl.weights.block import SharedTensors
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.membership import life_of
from async_rl.weights.sending import Outgoing
from async_rl.weights.tensors import tensor_spec

GPU = torch.device("meta")


class Recorder:
    """torch.cuda and NCCL."""

    device = GPU

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.copies_hang = self.sends_hang = False
        self._current = "default"
        self._num_sent = 0

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
LIFE = life_of(MEMBER)


class Learner:
    """Sends one tensor of 1,000 bytes in pieces of 400."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.exporter = exporter()
        given = learner_side("weights.transfer=collective", device=GPU, exporter=self.exporter)
        self.sender = Broadcaster(given, lambda: 0.0)
        self._num_loads = 0

    async def send(self) -> None:
        with SharedTensors([tensor_spec("t", torch.zeros(250))]) as block:
            self.exporter.block.content = block.content[:-124]
            await self.sender.send(block.write(1, [torch.zeros(250)]))

    async def join(self) -> float:
        """Start a load; return how long its member waits."""
        self._num_loads += 1
        seat = await seat_of(self.sender, load(self._num_loads, LIFE), "GPU-2")
        assert (seat.backend, seat.bucket_bytes) == ("nccl", 400)
        return float(seat.timeout_s)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Learner]:
    monkeypatch.setattr(broadcast, "device_name", lambda _: "GPU-1")
    monkeypatch.setitem(broadcast.BUCKET_BYTES, "nccl", 400)
    learner = Learner()
    place = SimpleNamespace(address="", secret="", open=len, call_off=len, close=list)
    monkeypatch.setattr(broadcast, "Rendezvous", lambda _: place)
    monkeypatch.setattr(receiving, "join", lambda *_: learner.recorder)

    def outgoing(device: torch.device, *, piece_bytes: int) -> Outgoing:
        assert piece_bytes == 400, "no more of the GPU than a piece takes"
        return Outgoing(device, piece_bytes=piece_bytes, cuda=learner.recorder)

    monkeypatch.setattr(sending, "Outgoing", outgoing)
    yield learner
    learner.sender.close()


async def test_the_next_piece_is_copied_while_nccl_sends_one(learner: Learner) -> None:
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


@pytest.mark.parametrize("is_copying", [False, True])
async def test_a_copy_that_hangs_is_no_member_s_fault(is_copying: bool, learner: Learner) -> None:
    learner.recorder.sends_hang = True
    learner.recorder.copies_hang = is_copying
    patience_s = await learner.join()
    said = "rank 0 of the learner: it let" if is_copying else "rank 0 waited"
    with pytest.raises(BroadcastBroken, match=said) as found:
        await learner.send()
    assert isinstance(found.value, SenderLate) is is_copying
    assert learner.recorder.did[-1] == ("close",)
    assert await learner.join() == (2 * patience_s if is_copying else patience_s)
