"""The filter in front of a listener of gloo: whom it admits, and how many fit."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.core.errors import InfrastructureError
from async_rl.weights import gate

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_OPTMEM = Path("/proc/sys/net/core/optmem_max")
# Above 2^31 and below, with ports above 2^15 and below, several per address and more than a block.
PEERS = [(f"10.{i}.0.1", 1000 + 20_000 * j) for i in range(3) for j in range(3)]
PEERS += [("192.168.0.1", 2000 + i) for i in range(600)]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connects(listener: socket.socket, source: tuple[str, int]) -> bool:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(source)
        client.settimeout(0.05)
        try:
            client.connect(listener.getsockname())
        except TimeoutError:
            return False
        with listener.accept()[0]:
            return True


def test_the_filter_admits_each_announced_address_with_its_port_and_no_other(
    listener: socket.socket,
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    admitted = [("127.0.0.2", free), ("127.0.0.3", free + 1), *PEERS]
    gate._admit(listener.fileno(), admitted)
    ends = itertools.product(("127.0.0.1", "127.0.0.2", "127.0.0.3"), (free, free + 1))
    assert {end for end in ends if connects(listener, end)} == set(admitted[:2])


@pytest.mark.parametrize("num_at_once", [1, 2])
def test_the_listener_is_found_although_others_open_and_close_theirs(num_at_once: int) -> None:
    """gloo closes the listeners of an earlier group in a thread of its own."""
    earlier = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def listen() -> socket.socket:
        earlier.close()  # its descriptor is free for the next listener
        for _ in range(1 if opened else num_at_once):
            opened.append(socket.create_server(("127.0.0.1", 0)))
        return opened[-1]

    found = gate.connect_privately(None, 1, listen=listen, connect=lambda listener: listener)
    assert found is opened[-1]
    assert not connects(found, ("127.0.0.1", 0))
    for listener in opened:
        listener.close()


def test_every_peer_of_a_long_filter_is_admitted(listener: socket.socket) -> None:
    """Blocks of more ports than a jump can skip."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    around = [("127.0.0.1", port) for port in range(1, 600)]
    for index in (0, 249, 250, 251, 598):
        gate._admit(listener.fileno(), [*around[:index], ("127.0.0.1", free), *around[index:]])
        assert connects(listener, ("127.0.0.1", free))
        gate._admit(listener.fileno(), around)
        assert not connects(listener, ("127.0.0.1", free))


def in_small_memory(num_machines: int, num_ranks: int) -> str:
    """What a kernel says that gives filters 20,480 bytes; in a network of its own."""

    def attach() -> str:
        # The network of this thread only, which ends with it.
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            return os.strerror(ctypes.get_errno())
        _OPTMEM.write_text("20480")
        peers = [
            (f"192.168.{i // 250}.{i % 250}", 1000 + j)
            for i in range(num_machines)
            for j in range(num_ranks)
        ]
        with socket.socket() as listener:
            try:
                gate._admit(listener.fileno(), peers)
            except InfrastructureError as error:
                return str(error)
        return ""

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(attach).result()


@pytest.mark.skipif(
    "not permitted" in in_small_memory(1, 1), reason="needs the right to make a network"
)
def test_the_filter_holds_as_many_ranks_as_it_says_and_names_the_limit_beyond() -> None:
    assert in_small_memory(1, 2455) == ""
    assert in_small_memory(359, 1) == ""
    for many in ((1, 2456), (360, 1)):
        assert "net.core.optmem_max=20480); raise the limit with sysctl" in in_small_memory(*many)
