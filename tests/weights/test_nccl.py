"""The NCCL path of a broadcast, with torch's ProcessGroupNCCL played: the CPU build of torch has
none. The player records every call, and refuses names that torch's own interface lacks.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist

from async_rl.core.errors import BroadcastBroken
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.block import SharedTensors, SharedTensorsReader, tensor_spec
from async_rl.weights.broadcast import BroadcastReceiver, _Seated
from async_rl.weights.communicator import NcclCommunicator, broadcast
from async_rl.weights.rendezvous import Rendezvous

CPU = torch.device("cpu")
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
    def __init__(self) -> None:
        self._timeout = timedelta(0)
        self.config = SimpleNamespace(blocking=-1)


class PlayedNccl:
    """All ranks of one store meet here; a broadcast completes once every rank has called it."""

    Options = Options
    made: ClassVar[list[PlayedNccl]] = []
    boards: ClassVar[dict[int, dict[int, Any]]] = {}
    hang: ClassVar[bool] = False

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.environment = {
            name: os.environ.get(name)
            for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_SOCKET_IFNAME")
        }
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
            if PlayedNccl.hang or 0 not in board:
                return False
            if self.rank:
                flat.copy_(board[0])
            return True

        self.works.append(Work(is_done))
        return self.works[-1]

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlayedNccl]]:
    """Plays NCCL, and puts back what a communicator sets in the environment."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("NCCL_SOCKET_IFNAME", None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedNccl, raising=False)
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        devices.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    PlayedNccl.made, PlayedNccl.boards, PlayedNccl.hang = [], {}, False
    yield PlayedNccl
    assert set(devices) <= {CPU}


def communicator(rank: int = 1, host: str = "127.0.0.1") -> NcclCommunicator:
    store: Any = SimpleNamespace(close=list)
    return NcclCommunicator(store, rank, 3, host=host, device=CPU)


def test_environment_and_options_leave_every_deadline_to_the_caller() -> None:
    communicator()
    [group] = PlayedNccl.made
    # 0: torch would otherwise end the process when a peer is lost.
    assert group.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert group.environment["NCCL_SOCKET_IFNAME"] == "=lo"
    # When a timeout of torch passes, it ends the process.
    assert group.options._timeout >= timedelta(days=1)
    # A call that blocks could not be aborted.
    assert group.options.config.blocking == 0


def test_an_interface_that_the_user_chose_is_kept() -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "ib0"
    communicator()
    assert PlayedNccl.made[0].environment["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"no network interface .* 192\.0\.2\.1"):
        communicator(host="192.0.2.1")


def test_a_broadcast_that_hangs_ends_at_its_deadline_and_is_aborted() -> None:
    PlayedNccl.hang = True
    member = communicator(rank=1)
    started_s = time.monotonic()
    with pytest.raises(BroadcastBroken, match=r"rank 1 waited 0\.05 s"):
        broadcast(member, torch.zeros(3, dtype=torch.uint8), timeout_s=0.05)
    assert 0.05 <= time.monotonic() - started_s < 2
    [group] = PlayedNccl.made
    assert group.works[0].num_waits == 0, "waiting for the stream has no deadline"
    assert group.works[0].num_polls > 1
    member.close()
    assert group.num_aborts == 1


@pytest.fixture
def version() -> Iterator[Manifest]:
    tensors = {f"t{i}": torch.full((700,), float(i)) for i in range(4)}
    with SharedTensors([tensor_spec(name, t) for name, t in tensors.items()]) as publisher:
        yield publisher.write(3, tensors.values())


def seats(num_ranks: int) -> tuple[Rendezvous, Seat]:
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.open("one.1")
    return rendezvous, Seat(
        communicator="one.1",
        backend="nccl",
        store=rendezvous.address,
        secret=rendezvous.secret,
        host="127.0.0.1",
        world_size=num_ranks,
        first_rank=1,
        bucket_bytes=4096,
        timeout_s=10.0,
    )


def send(manifest: Manifest, seat: Seat) -> _Seated:
    """Rank 0, bucket by bucket as the learner sends."""
    from async_rl.weights.broadcast import buckets

    member = _Seated(CPU)
    group = member.joined(seat, 0)
    with SharedTensorsReader(manifest) as reader:
        block = torch.from_numpy(reader.block)
        for piece in buckets(manifest, seat.bucket_bytes):
            broadcast(group, block[piece.begin : piece.end], timeout_s=5)
    return member


def test_a_whole_version_arrives_over_nccl_and_its_communicator_is_kept(
    version: Manifest,
) -> None:
    rendezvous, seat = seats(2)
    receiver = BroadcastReceiver(0, CPU)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, version, seat)
        with receiver.receive(version, seat) as tensors:
            found = {name: float(tensor[0]) for name, tensor in tensors}
        sending.result(10)
    assert found == {"t0": 0.0, "t1": 1.0, "t2": 2.0, "t3": 3.0}
    for group in PlayedNccl.made:
        assert group.num_aborts == 0
        assert set(group.roots) == {(0, 0)}
        # Completion says that the kernel is done; waiting orders later work of the stream.
        assert {work.num_waits for work in group.works} == {1}
    receiver.close()
    assert sorted(group.num_aborts for group in PlayedNccl.made) == [0, 1]
    rendezvous.close()


def test_a_receiver_whose_learner_hangs_aborts_and_leaves_the_communicator(
    version: Manifest,
) -> None:
    rendezvous, seat = seats(2)
    PlayedNccl.hang = True
    receiver = BroadcastReceiver(0, CPU)
    short = msgspec.structs.replace(seat, timeout_s=0.3)
    joins = threading.Thread(target=lambda: _Seated(CPU).joined(short, 0), daemon=True)
    joins.start()
    with (
        pytest.raises(BroadcastBroken, match="a broadcast of weights failed"),
        receiver.receive(version, short) as tensors,
    ):
        list(tensors)
    assert max(group.num_aborts for group in PlayedNccl.made) == 1
    joins.join(5)
    rendezvous.close()


def test_the_player_has_no_name_that_torch_lacks() -> None:
    tree = ast.parse(INTERFACE.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    group = _names(found["ProcessGroupNCCL"]) | _names(found["Backend"])
    # Bound in C++ for all backends, and missing in the interface.
    group |= set(dir(dist.ProcessGroupGloo)) & {"broadcast"}
    assert {"Options", "abort", "broadcast", "blocking", "config", "_timeout"} <= group
    assert {"is_completed", "wait"} <= _names(found["Work"])
    assert {"rootRank", "rootTensor"} <= _names(found["BroadcastOptions"])


def _names(node: ast.ClassDef) -> set[str]:
    inner = [*node.body, *(i for c in node.body if isinstance(c, ast.ClassDef) for i in c.body)]
    fields = [n.target for n in inner if isinstance(n, ast.AnnAssign)]
    names = {target.id for target in fields if isinstance(target, ast.Name)}
    return names | {n.name for n in inner if isinstance(n, ast.FunctionDef | ast.ClassDef)}
