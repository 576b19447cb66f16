"""The NCCL path of a broadcast, in two parts that are played, since the CPU build of torch has
neither: torch's ProcessGroupNCCL, whose player records every call and refuses names that torch's
own interface lacks; and the learner's GPU, whose memory has no content (device "meta"): what it is
asked for, in which order and on which stream.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from weights_support import CPU, MEMBER, SEAT, exporter, learner_side, load, publisher, seat_of

from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.weights import broadcast, receiving, sending
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.communicator import NcclCommunicator, begin
from async_rl.weights.membership import life_of
from async_rl.weights.sending import Outgoing

VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "NCCL_SOCKET_IFNAME",
)
INTERFACE = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


class Played:
    """torch's class of process groups; broadcasts are complete unless they hang."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.hang = False
        self.may_abort = threading.Event()
        self.may_abort.set()

    def Options(self, is_high_priority_stream: bool) -> Any:
        config = SimpleNamespace(blocking=-1)
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config)

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Any:
        group = SimpleNamespace(options=options, num_waits=0, num_aborts=0)
        group.environment = {name: os.environ.get(name) for name in VARIABLES}

        def is_completed() -> bool:
            # As torch: the kernel of an aborted broadcast has ended.
            return group.num_aborts > 0 or not self.hang

        def wait() -> None:
            group.num_waits += 1

        def abort() -> None:
            self.may_abort.wait()
            group.num_aborts += 1

        group.abort = abort
        group.broadcast = lambda *_: SimpleNamespace(is_completed=is_completed, wait=wait)
        self.made.append(group)
        return group


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Plays NCCL, and puts back what a communicator sets in the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    monkeypatch.setattr(os, "environ", environment)
    played = Played()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", played, raising=False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    yield played
    played.may_abort.set()


def communicator(host: str = "127.0.0.1", closed: Callable[[], Any] = list) -> NcclCommunicator:
    store: Any = SimpleNamespace(close=closed)
    given = replace(SEAT, world_size=3, host=host, timeout_s=29.5)
    return NcclCommunicator(store, given, 1, CPU)


def test_every_deadline_is_the_callers_and_what_the_user_chose_is_kept(nccl: Played) -> None:
    communicator()
    [group] = nccl.made
    assert group.environment == {
        # 0: torch would otherwise end the process when a peer is lost.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "NCCL_SOCKET_IFNAME": "=lo",
        # Nothing ends the first broadcast, which connects, before torch does.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    }
    # When a timeout of torch passes, it ends the process.
    assert group.options._timeout >= timedelta(days=1)
    # A call that blocks could not be aborted.
    assert group.options.config.blocking == 0
    assert group.options.is_high_priority_stream
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    os.environ.update(chosen)
    communicator()
    assert chosen.items() <= nccl.made[1].environment.items()
    with pytest.raises(RuntimeError, match=r"no network interface .* 192\.0\.2\.1"):
        communicator("192.0.2.1")


def test_a_broadcast_that_hangs_ends_at_its_deadline_and_is_aborted(nccl: Played) -> None:
    nccl.hang = True
    aborts_at_close: list[int] = []
    member = communicator(closed=lambda: aborts_at_close.append(nccl.made[0].num_aborts))
    finish = begin(member, torch.zeros(3, dtype=torch.uint8), 0, timeout_s=0.05)
    with pytest.raises(BroadcastBroken, match=r"rank 1 waited 0\.05 s"):
        finish()
    [group] = nccl.made
    assert group.num_waits == 0, "waiting for the stream has no deadline"
    nccl.may_abort.clear()
    ending = threading.Timer(0.05, nccl.may_abort.set)
    ending.start()
    member.close()
    assert aborts_at_close == [1], "close waits for the abort"
    # For torch an aborted broadcast is complete.
    with pytest.raises(BroadcastBroken, match="gave up"):
        finish()


def test_a_broadcast_whose_abort_hangs_ends(nccl: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's abort waits for a call that connects."""
    nccl.hang = True
    nccl.may_abort.clear()
    member = communicator()
    finish = begin(member, torch.zeros(3, dtype=torch.uint8), 0, timeout_s=3600)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(finish)
        member.cancel()
        assert [t.daemon for t in threading.enumerate() if t.name == "abort"] == [True]
        with pytest.raises(BroadcastBroken, match="rank 1 gave up: another rank was lost"):
            waiting.result(10)
    monkeypatch.setattr("async_rl.weights.communicator.ABORT_S", 0.01)
    member.close()
    assert nccl.made[0].num_aborts == 0, "close returns before the abort"


def test_the_player_has_no_name_that_torch_lacks() -> None:
    tree = ast.parse(INTERFACE.read_text())
    found = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind, names in {
        "ProcessGroupNCCL": "Options abort config blocking is_high_priority_stream",
        "Backend": "_timeout",
        "Work": "is_completed wait",
        "BroadcastOptions": "rootRank",
    }.items():
        assert set(names.split()) <= set(re.findall(r"\w+", found[kind]))
    # Bound in C++ for all backends, and missing in the interface.
    assert "broadcast" in dir(dist.ProcessGroupGloo)


GPU = torch.device("meta")


class Recorder:
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
        with publisher([torch.zeros(250)]) as block:
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
