"""The NCCL path of a broadcast, with torch's ProcessGroupNCCL played: the CPU build of torch has
none. The player records every call, and refuses names that torch's own interface lacks.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from weights_support import CPU, SEAT

from async_rl.core.errors import BroadcastBroken
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.changes import Changes, listed
from async_rl.weights.communicator import NcclCommunicator, begin
from async_rl.weights.outgoing import buckets
from async_rl.weights.receiving import BroadcastReceiver, Seated
from async_rl.weights.rendezvous import Rendezvous
from async_rl.weights.tensors import tensor_spec

VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "NCCL_SOCKET_IFNAME",
)
INTERFACE = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


class Work:
    """What NCCL does between two calls: nothing until `is_done` says so."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done
        self.num_polls = 0
        self.num_waits = 0

    def is_completed(self) -> bool:
        self.num_polls += 1
        return self._is_done()

    def wait(self) -> bool:
        self.num_waits += 1
        return True


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(0)
        self.config = SimpleNamespace(blocking=-1)


class PlayedNccl:
    """All ranks of one store meet here; a broadcast completes once every rank has called it."""

    Options = Options
    made: ClassVar[list[PlayedNccl]] = []
    boards: ClassVar[dict[int, dict[int, Any]]] = {}
    hang: ClassVar[bool] = False
    may_abort: ClassVar[threading.Event]
    closed: ClassVar[list[int]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.environment = {name: os.environ.get(name) for name in VARIABLES}
        self.works: list[Work] = []
        self.roots: list[tuple[int, int]] = []
        self.num_aborts = 0
        PlayedNccl.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.roots.append((options.rootRank, options.rootTensor))
        [flat] = tensors
        board = PlayedNccl.boards.setdefault(len(self.works), {})
        if self.rank == 0:
            board[0] = flat.clone()

        def is_done() -> bool:
            # As torch: the kernel of an aborted broadcast has ended.
            if self.num_aborts:
                return True
            if PlayedNccl.hang or 0 not in board:
                return False
            if self.rank:
                flat.copy_(board[0])
            return True

        self.works.append(Work(is_done))
        return self.works[-1]

    def abort(self) -> None:
        PlayedNccl.may_abort.wait()
        self.num_aborts += 1


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlayedNccl]]:
    """Plays NCCL, and puts back what a communicator sets in the environment."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in VARIABLES:
        os.environ.pop(name, None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedNccl, raising=False)
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        devices.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    PlayedNccl.made, PlayedNccl.boards, PlayedNccl.hang = [], {}, False
    PlayedNccl.may_abort = threading.Event()
    PlayedNccl.may_abort.set()
    yield PlayedNccl
    PlayedNccl.may_abort.set()
    assert set(devices) <= {CPU}


def communicator(rank: int = 1, host: str = "127.0.0.1") -> NcclCommunicator:
    store: Any = SimpleNamespace(close=lambda: PlayedNccl.closed.append(rank))
    given = replace(SEAT, world_size=3, host=host, timeout_s=29.5)
    return NcclCommunicator(store, given, rank, CPU)


def test_every_deadline_is_the_callers_and_what_the_user_chose_is_kept() -> None:
    communicator()
    [group] = PlayedNccl.made
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
    assert chosen.items() <= PlayedNccl.made[1].environment.items()
    with pytest.raises(RuntimeError, match=r"no network interface .* 192\.0\.2\.1"):
        communicator(host="192.0.2.1")


def test_a_broadcast_that_hangs_ends_at_its_deadline_and_is_aborted_and_incomplete() -> None:
    PlayedNccl.hang = True
    member = communicator(rank=1)
    finish = begin(member, torch.zeros(3, dtype=torch.uint8), 0, timeout_s=0.05)
    with pytest.raises(BroadcastBroken, match=r"rank 1 waited 0\.05 s"):
        finish()
    [group] = PlayedNccl.made
    assert group.works[0].num_waits == 0, "waiting for the stream has no deadline"
    assert 1 < group.works[0].num_polls < 200, "a poll every half of a millisecond"
    PlayedNccl.may_abort.clear()
    PlayedNccl.closed.clear()
    ending = threading.Timer(0.05, PlayedNccl.may_abort.set)
    ending.start()
    member.close()
    assert (group.num_aborts, PlayedNccl.closed) == (1, [1]), "close waits for the abort"
    # For torch an aborted broadcast is complete.
    assert group.works[0].is_completed()
    with pytest.raises(BroadcastBroken, match="gave up"):
        finish()


def test_another_thread_ends_a_broadcast_although_the_abort_itself_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's abort waits for a call that connects."""
    PlayedNccl.hang = True
    PlayedNccl.may_abort.clear()
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
    assert PlayedNccl.made[0].num_aborts == 0, "close returns before the abort"


@pytest.fixture
def version() -> Iterator[Manifest]:
    tensors = {f"t{i}": torch.full((700,), float(i)) for i in range(4)}
    with SharedTensors([tensor_spec(name, t) for name, t in tensors.items()]) as publisher:
        yield publisher.write(3, tensors.values())


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1")
    yield rendezvous
    rendezvous.close()


def seat_at(rendezvous: Rendezvous, name: str = "one", **changes: Any) -> Seat:
    rendezvous.open(name)
    seat = replace(SEAT, communicator=name, backend="nccl", store=rendezvous.address)
    return replace(seat, secret=rendezvous.secret, **changes)


def send(manifest: Manifest, seat: Seat, changes: Changes | None = None) -> Seated:
    """Rank 0, piece by piece as the learner sends."""
    member = Seated(CPU)
    group = member.joined(seat, 0)
    with SharedTensorsReader(manifest) as reader:
        block = reader.content
        if changes is not None:
            manifest, block = changes.difference.manifest, changes.content
        for bucket in buckets(manifest, seat.bucket_bytes):
            for piece in torch.split(block[bucket.begin : bucket.end], seat.bucket_bytes):
                begin(group, piece, 0, timeout_s=5)()
    return member


# A tensor has 2,800 bytes, 2,816 with its padding.
@pytest.mark.parametrize(("bucket_bytes", "num_pieces"), [(6000, 2), (1000, 12), (2816, 4)])
def test_a_whole_version_arrives_over_nccl_and_its_communicator_is_kept(
    bucket_bytes: int, num_pieces: int, version: Manifest, rendezvous: Rendezvous
) -> None:
    seat = seat_at(rendezvous, bucket_bytes=bucket_bytes)
    receiver = BroadcastReceiver(0, CPU)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, version, seat)
        with receiver.receive(version, seat) as tensors:
            first = next(tensors)
            # The next bucket arrives while the engine takes this one.
            num_begun = [len(group.works) for group in PlayedNccl.made if group.rank]
            found = dict([first, *tensors])
        sending.result(10)
    num_buckets = min(num_pieces, 4)
    assert num_begun == [2 * num_pieces // num_buckets]
    # Kept until the end, as an engine may: no later bucket has overwritten one.
    assert {name: set(tensor.tolist()) for name, tensor in found.items()} == {
        f"t{number}": {float(number)} for number in range(4)
    }
    for group in PlayedNccl.made:
        assert len(group.works) == num_pieces
        assert group.num_aborts == 0
        assert set(group.roots) == {(0, 0)}
        # Completion says that the kernel is done; waiting orders later work of the stream.
        assert {work.num_waits for work in group.works} == {1}
    receiver.leave()
    assert sorted(group.num_aborts for group in PlayedNccl.made) == [0, 1]


def test_an_engine_that_has_the_version_before_gets_the_changes_and_any_other_gives_up(
    rendezvous: Rendezvous,
) -> None:
    tensors = [torch.randn(5_000).bfloat16(), torch.randn(300).bfloat16()]
    old = [tensor.clone() for tensor in tensors]
    receiver = BroadcastReceiver(0, CPU)
    with (
        SharedTensors([tensor_spec(str(i), tensor) for i, tensor in enumerate(old)]) as block,
        ThreadPoolExecutor(1) as pool,
    ):

        def received(manifest: Manifest, seat: Seat, **sent: Any) -> dict[str, torch.Tensor]:
            PlayedNccl.boards.clear()
            PlayedNccl.made.clear()
            sending = pool.submit(send, manifest, seat, **sent)
            with receiver.receive(manifest, seat, takes_changes=True) as tensors:
                found = dict(tensors)
            sending.result(10)
            return found

        received(block.write(1, tensors), seat_at(rendezvous))
        for tensor in tensors:
            tensor[7:30] = 1
        after = block.write(2, tensors, compares=True)
        assert block.changes is not None
        facts: Any = {"difference": block.changes.difference}
        lists = received(after, seat_at(rendezvous, "two", **facts), changes=block.changes)
        for number, tensor in enumerate(old):
            positions, words = listed(lists[str(number)], len(tensor))
            tensor.view(torch.int16)[positions] = words
            assert torch.equal(tensor, tensors[number])
        # It has version 2 now, which is not the one that changed.
        with pytest.raises(BroadcastBroken, match="takes no changes from version 1"):
            received(after, seat_at(rendezvous, "three", **facts), changes=block.changes)
    assert [len(group.works) for group in PlayedNccl.made] == [1, 1], "it took part"
    receiver.leave()


def test_the_player_has_no_name_that_torch_lacks() -> None:
    tree = ast.parse(INTERFACE.read_text())
    found = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind, names in {
        "ProcessGroupNCCL": "Options abort config blocking is_high_priority_stream",
        "Backend": "_timeout",
        "Work": "is_completed wait",
        "BroadcastOptions": "rootRank rootTensor",
    }.items():
        assert set(names.split()) <= set(re.findall(r"\w+", found[kind]))
    # Bound in C++ for all backends, and missing in the interface.
    assert "broadcast" in dir(dist.ProcessGroupGloo)
