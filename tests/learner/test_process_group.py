"""Strangers cannot reach the process group of the learner's ranks."""

import ctypes
import os
import resource
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from learner_support import make_trainer
from warm_processes import warm_context

from async_rl.learner import sharding

_DESCRIPTORS = 256
_WAIT_S = 60
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


def listeners(pid: int) -> list[tuple[str, int]]:
    ends = psutil.Process(pid).net_connections("tcp")
    return [tuple(end.laddr) for end in ends if end.status == psutil.CONN_LISTEN]


def take_the_network_address_as_host_name() -> None:
    """On most servers the host name is that of a network interface, which gloo uses by itself.

    Needs the right to make a namespace of host names; without it the name stays as it is.
    """
    ends = [end for name, ends in psutil.net_if_addrs().items() if name != "lo" for end in ends]
    addresses = [end.address for end in ends if end.family == socket.AF_INET]
    if addresses and ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(addresses[0])


def be_a_rank(rank: int, directory: Path, parent: Connection) -> None:
    """Join, wait until the stranger has tried, then use both groups."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    take_the_network_address_as_host_name()
    store = dist.FileStore(str(directory / "rendezvous"), 2)  # type: ignore[attr-defined]
    sharding.join(store, rank, 2, host="127.0.0.1", device=torch.device("cpu"), timeout_s=_WAIT_S)
    second = dist.new_group(backend=sharding.BACKEND)
    parent.send("joined")
    parent.recv()
    sums = []
    for group in (None, second):
        x = torch.ones(1000) * (rank + 1)
        dist.all_reduce(x, group=group)
        sums.append(float(x[0]))
    parent.send(sums)


def connects(address: tuple[str, int]) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.002)
        try:
            stranger.connect(address)
        except OSError:
            return False
        return True


def test_a_stranger_cannot_connect_to_the_ranks_nor_use_up_their_descriptors(
    tmp_path: Path,
) -> None:
    context = warm_context()
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=be_a_rank, args=(rank, tmp_path, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(_WAIT_S)
            assert ours.recv() == "joined"
        addresses = [address for process in ranks for address in listeners(process.pid or 0)]
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len(addresses) == 4
        assert not any(connects(address) for address in addresses for _ in range(_DESCRIPTORS))
        for ours, _ in pipes:
            ours.send("go on")
        for ours, _ in pipes:
            assert ours.poll(_WAIT_S)
            assert ours.recv() == [3.0, 3.0]
        for process in ranks:
            process.join(_WAIT_S)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()


def test_one_rank_opens_no_listener(model_path: Path, tmp_path: Path) -> None:
    before = listeners(os.getpid())
    make_trainer(model_path, "grpo_code").save(tmp_path / "step", 0).result()
    assert listeners(os.getpid()) == before
