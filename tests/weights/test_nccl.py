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
from async_rl.weights.communicator import NcclCommunicator, begin

VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "NCCL_SOCKET_IFNAME",
)
INTERFACE = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


class Work:
    """What NCCL does between two calls: nothing until `is_completed` says so."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done
        self.num_waits = 0

    def is_completed(self) -> bool:
        return self._is_done()

    def wait(self) -> None:
        self.num_waits += 1


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=-1)

    _timeout = timedelta(0)


class PlayedNccl:
    """One rank; its broadcasts are complete unless they hang."""

    Options = Options
    made: ClassVar[list[PlayedNccl]] = []
    hang: ClassVar[bool] = False
    may_abort: ClassVar[threading.Event]
    closed: ClassVar[list[int]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options = options
        self.environment = {name: os.environ.get(name) for name in VARIABLES}
        self.works: list[Work] = []
        self.num_aborts = 0
        PlayedNccl.made.append(self)

    def broadcast(self, _: list[torch.Tensor], options: Any) -> Work:
        # As torch: the kernel of an aborted broadcast has ended.
        self.works.append(Work(lambda: self.num_aborts > 0 or not PlayedNccl.hang))
        return self.works[-1]

    def abort(self) -> None:
        PlayedNccl.may_abort.wait()
        self.num_aborts += 1


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plays NCCL, and puts back what a communicator sets in the environment."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in VARIABLES:
        os.environ.pop(name, None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    PlayedNccl.made, PlayedNccl.hang = [], False
    PlayedNccl.may_abort = threading.Event()
    PlayedNccl.may_abort.set()
    yield
    PlayedNccl.may_abort.set()


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


def test_another_thread_ends_a_broadcast_whose_abort_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
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
