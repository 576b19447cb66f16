"""The filter in front of a listener of gloo: whom it admits, and how many fit."""

import itertools
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from async_rl.core.errors import InfrastructureError
from async_rl.weights import gate

# Above 2^31 and below, with ports above 2^15 and below, several per address and more than a block.
PEERS = [(f"10.{i}.0.1", 1000 + 20_000 * j) for i in range(3) for j in range(3)]
PEERS += [("192.168.0.1", 2000 + i) for i in range(600)]


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    ends: list[socket.socket] = []
    yield ends
    for end in ends:
        end.close()


def listening(opened: list[socket.socket]) -> socket.socket:
    opened.append(socket.create_server(("127.0.0.1", 0)))
    return opened[-1]


def connects(listener: socket.socket, source: tuple[str, int]) -> bool:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(source)
        client.settimeout(0.03)
        try:
            client.connect(listener.getsockname())
        except TimeoutError:
            return False
        with listener.accept()[0]:
            return True


def test_the_filter_admits_announced_addresses_only(opened: list[socket.socket]) -> None:
    listener = listening(opened)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    # Addresses at which no other program has connections, whose ports would be in use.
    admitted = [("127.0.7.2", free), ("127.0.7.3", free + 1), *PEERS]
    gate.admit(listener.fileno(), admitted)
    ends = itertools.product(("127.0.7.1", "127.0.7.2", "127.0.7.3"), (free, free + 1))
    assert {end for end in ends if connects(listener, end)} == set(admitted[:2])
    # Blocks of more ports than a jump can skip.
    around = [("127.0.0.1", port) for port in range(1, 600)]
    for index in (0, 249, 250, 251, 598):
        gate.admit(listener.fileno(), [*around[:index], ("127.0.0.1", free), *around[index:]])
        assert connects(listener, ("127.0.0.1", free))
    gate.admit(listener.fileno(), around)
    assert not connects(listener, ("127.0.0.1", free))


def test_announced_ranks_are_connected_and_nobody_after_them(opened: list[socket.socket]) -> None:
    store = torch._C._distributed_c10d.HashStore()
    listeners: dict[int, socket.socket] = {}
    have_opened = threading.Barrier(2)

    def connect(rank: int) -> list[socket.socket]:
        def listen() -> socket.socket:
            listeners[rank] = listening(opened)
            return listeners[rank]

        def meet(listener: socket.socket) -> list[socket.socket]:
            have_opened.wait()
            other = listeners[1 - rank].getsockname()
            return [socket.create_connection(other, timeout=10), listener.accept()[0]]

        return gate.connect_privately(store, 2, listen=listen, connect=meet)[0]

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(connect, (0, 1))
    # The address of a rank that has left admits nobody else.
    source = first[0].getsockname()
    for end in (first[0], second[1]):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
    assert not connects(listeners[1], source)
    opened += [first[1], second[0]]


def test_a_stranger_before_the_filter_is_named(opened: list[socket.socket]) -> None:
    def listen() -> socket.socket:
        listener = listening(opened)
        opened.append(socket.create_connection(listener.getsockname()))
        return listener

    def connect(listener: socket.socket) -> None:
        opened.append(listener.accept()[0])
        assert not connects(listener, ("127.0.0.1", 0))

    with pytest.raises(InfrastructureError, match=r"a stranger at .*find and end that process"):
        gate.connect_privately(None, 1, listen=listen, connect=connect)


def test_a_user_who_may_not_set_filters_can_have_one_rank_and_is_told_about_several(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: list[socket.socket]
) -> None:
    """As on Linux 6.18, where it takes CAP_NET_ADMIN."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)

    def listen() -> socket.socket:
        opened.append(socket.socket())  # create_server sets an option
        opened[-1].bind(("127.0.0.1", 0))
        opened[-1].listen()
        return opened[-1]

    group, _ = gate.connect_privately(None, 1, listen=listen, connect=lambda it: it)
    assert group is opened[0]
    assert f"any local user can connect to gloo's listener {group.getsockname()}" in caplog.text
    assert list(gate.rank_problems(1, per_machine=1)) == []
    [problem] = gate.rank_problems(2, per_machine=2)
    assert "learner.ranks=2: " in problem
    assert "CAP_NET_ADMIN" in problem


def test_the_listener_is_found_among_others(opened: list[socket.socket]) -> None:
    """gloo closes the listeners of an earlier group in a thread of its own."""
    earlier = listening([])

    def listen() -> socket.socket:
        earlier.close()  # its descriptor is free for the next listener
        for _ in range(1 if opened else 2):
            listening(opened)
        return opened[-1]

    found, _ = gate.connect_privately(None, 1, listen=listen, connect=lambda listener: listener)
    assert found is opened[-1]
    assert not connects(found, ("127.0.0.1", 0))


def test_a_learner_may_have_more_ranks_if_they_share_machines() -> None:
    assert list(gate.rank_problems(1504, per_machine=8)) == []
    [problem] = gate.rank_problems(1504, per_machine=1)
    assert "learner.ranks=1504: a filter of the kernel cannot hold 1503 ranks" in problem
