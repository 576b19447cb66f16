"""Listeners of gloo that accept only the ranks of their group.

gloo has no authentication: it accepts every connection, keeps it open, and aborts its process once
no descriptor is left. TLS is not part of torch's builds. So the kernel decides here: a filter on
the listening socket drops every packet, unless a rank has announced its connection in the group's
store. Only the run's own processes have access to the store. While a rank is connected, no other
process can use its address and port. Once all ranks are connected, the filter drops everything.

A dropped packet is repeated by the kernel after a second, so ranks connect in about a second.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import psutil

from async_rl.core.errors import InfrastructureError

Device = TypeVar("Device")
Group = TypeVar("Group")
_End = tuple[str, int]
_Dial = tuple[_End, _End]
"""A connection attempt of a rank: its source and its target."""

_SO_ATTACH_FILTER = 26  # linux/socket.h; Python has no name for it
# The listener is recognised as the new one of this process, so one thread opens at a time.
_ONE_OPENS = threading.Lock()
_LOOK_S = 0.02  # the kernel reports no event for a connection attempt; a fiftieth of its repetition
_ACCEPT = 0xFFFFFFFF
_DROP = 0
# linux/filter.h: load a word or half-word, compare and jump, return.
_LD_WORD = 0x20
_LD_HALF = 0x28
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_NET_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF: offsets from here count in the IP header
_SOURCE_ADDRESS = _NET_HEADER + 12
_SOURCE_PORT = 0  # offset in the TCP header, where the data of a socket's filter start


def connect_privately(
    store: Any,
    rank: int,
    size: int,
    *,
    listen: Callable[[], Device],
    connect: Callable[[Device], Group],
) -> Group:
    """Return `connect(listen())`, where only ranks of the group can reach what `listen` opened.

    store: of torch, shared by the ranks only. listen: opens one listening socket and does not
    accept yet. connect: returns once all ranks are connected. Raises InfrastructureError if a
    stranger connected before the filter was in place.
    """
    with _ONE_OPENS:
        before = {end.fd for end in _sockets(psutil.CONN_LISTEN)}
        device = listen()
        (listener,) = (end for end in _sockets(psutil.CONN_LISTEN) if end.fd not in before)
    # From now on the kernel drops all packets. A stranger that was faster is found by `check`.
    gate = _Gate(store, rank, size, listener)
    try:
        group = connect(device)
    finally:
        gate.close()
    gate.check()
    return group


class _Gate:
    """Announces this rank's connection attempts, and admits the attempts of the other ranks."""

    def __init__(self, store: Any, rank: int, size: int, listener: Any) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._fd = listener.fd
        self._address: _End = tuple(listener.laddr)
        self._admitted: set[_End] = set()
        self._announced: set[_Dial] = set()
        _admit(self._fd, ())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        # A group of one rank has no other to admit.
        if self._others:
            self._thread.start()

    def close(self) -> None:
        """Drop every further connection."""
        self._is_over.set()
        if self._others:
            self._thread.join()
        _admit(self._fd, ())

    def check(self) -> None:
        """Raise InfrastructureError if a peer is connected that is not an announced rank."""
        for end in _sockets(psutil.CONN_ESTABLISHED):
            if tuple(end.laddr) == self._address and tuple(end.raddr) not in self._admitted:
                raise InfrastructureError(
                    f"a stranger at {end.raddr} connected to gloo's listener {self._address} before"
                    " it was closed; find and end that process, then try again"
                )

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._announce()
            self._admit_announced()

    def _announce(self) -> None:
        attempts: set[_Dial] = {
            (tuple(end.laddr), tuple(end.raddr)) for end in _sockets(psutil.CONN_SYN_SENT)
        }
        if not attempts <= self._announced:
            # Never removed: `check` accepts the peers that were admitted once.
            self._announced |= attempts
            self._store.set(_key(self._rank), msgspec.json.encode(list(self._announced)))

    def _admit_announced(self) -> None:
        dials: list[_Dial] = []
        for other in self._others:
            if self._store.check([_key(other)]):
                dials += msgspec.json.decode(self._store.get(_key(other)), type=list[_Dial])
        admitted = {source for source, target in dials if target == self._address}
        if admitted != self._admitted:
            self._admitted = admitted
            _admit(self._fd, admitted)


def _key(rank: int) -> str:
    return f"dials of rank {rank}"


def _sockets(status: str) -> list[Any]:
    # gloo listens at an IPv4 address of the run.
    connections = psutil.Process().net_connections("tcp4")
    return [end for end in connections if end.status == status]


def _admit(fd: int, sources: Collection[_End]) -> None:
    """Let the kernel drop every packet to a listening socket, except from these addresses.

    The kernel copies the filter to each accepted socket, where it continues to match.
    """
    program = b""
    for address, port in sources:
        (word,) = struct.unpack("!I", socket.inet_aton(address))
        program += _step(_LD_WORD, _SOURCE_ADDRESS) + _step(_JUMP_EQUAL, word, if_not=3)
        program += _step(_LD_HALF, _SOURCE_PORT) + _step(_JUMP_EQUAL, port, if_not=1)
        program += _step(_RETURN, _ACCEPT)
    program += _step(_RETURN, _DROP)
    steps = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _step(code: int, value: int, *, if_not: int = 0) -> bytes:
    """Encode one instruction; a comparison that fails skips the next `if_not` instructions."""
    return struct.pack("=HBBI", code, 0, if_not, value)
