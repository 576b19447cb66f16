"""Listeners of gloo that accept only the ranks of their group.

gloo has no authentication: it accepts every connection, keeps it open, and aborts its process once
no descriptor is left. TLS is not part of torch's builds. So the kernel decides here: a filter on
the listening socket drops every packet, unless a rank has announced its connection in the group's
store. Only the run's own processes have access to the store: a file of the run, or
weights/rendezvous.py. While a rank is connected, no other process can use its address and port.
Once all ranks are connected, the filter drops everything.

A filter has at most 4,096 instructions, and net.core.optmem_max bytes of memory: with the default
of 131,072 (20,480 before Linux 6.6) 4,023 (2,455) ranks of one machine, or 818 (359) with a machine
each; eight on a machine, 2,727.

Some kernels let only users with CAP_NET_ADMIN set a filter. A group of one rank then has an open
listener: a local user could exhaust its descriptors, and read or change nothing.

A dropped packet is repeated by the kernel after a second, so ranks connect in about a second.
"""

import collections
import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from async_rl.core.errors import InfrastructureError

_log = logging.getLogger(__name__)
Device = TypeVar("Device")
Group = TypeVar("Group")
_End = tuple[str, int]
_Dial = tuple[_End, _End]
"""A connection attempt of a rank: its source and its target."""

_SO_ATTACH_FILTER = 26  # linux/socket.h; Python has no name for it
# The listener is recognised as the new one of this process, so one thread opens at a time.
_ONE_OPENS = threading.Lock()
_LOOK_S = (
    0.05  # the kernel reports no event for a connection attempt; a twentieth of its repetition
)
_MOST_TRIES = 10
_ACCEPT = 0xFFFFFFFF
_DROP = 0
# linux/filter.h: load a word or half-word of the packet, store and load a word of memory, copy
# between the registers A and X, compare and jump, return.
_LD_WORD = 0x20
_LD_HALF = 0x28
_STORE = 0x02
_LD_MEMORY = 0x60
_A_TO_X = 0x07
_X_TO_A = 0x87
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_NET_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF: offsets from here count in the IP header
_SOURCE_ADDRESS = _NET_HEADER + 12
_MOST_COMPARED = 250  # ports: a jump skips at most 255 instructions
_SOURCE_PORT = 0  # offset in the TCP header, where the data of a socket's filter start


def connect_privately(
    store: Any,
    size: int,
    *,
    listen: Callable[[], Device],
    connect: Callable[[Device], Group],
) -> tuple[Group, Callable[[], None]]:
    """Return `connect(listen())`, where only ranks of the group can reach what `listen` opened, and
    a function that closes this rank's connections, also below a call that waits for a lost rank.

    store: of torch, shared by the ranks only. listen: opens one listening socket and does not
    accept yet. connect: returns once all ranks are connected. Raises InfrastructureError if there
    is no such socket, or if a stranger connected before the filter was in place.
    """
    with _ONE_OPENS:
        # Again if another part of this process opened a listener at the same time.
        for _ in range(_MOST_TRIES):
            before = _listeners().keys()
            device = listen()
            opened = [end for inode, end in _listeners().items() if inode not in before]
            if len(opened) == 1:
                break
        else:
            raise InfrastructureError(
                f"gloo opened {len(opened)} listeners at an IPv4 address instead of one; set"
                " network.host to an IPv4 address of this machine"
            )
    # From now on the kernel drops all packets. A stranger that was faster is found by `check`.
    gate = _Gate(store, size, opened[0])
    try:
        group = connect(device)
    finally:
        gate.close()
    gate.check()
    return group, gate.hang_up


def rank_problems(num_ranks: int, *, per_machine: int) -> Iterator[str]:
    """Yield why learner ranks, which all connect to each other, are too many for the filters of
    this kernel. per_machine: ranks that share an address.
    """
    if num_ranks == 1:
        return
    hosts = (socket.inet_ntoa(struct.pack("!I", i // per_machine)) for i in range(num_ranks - 1))
    peers = [(host, port % 2**16) for port, host in enumerate(hosts)]
    with socket.socket() as probe:
        try:
            admit(probe.fileno(), peers)
        except InfrastructureError as error:
            yield f"learner.ranks={num_ranks}: {error}"


class _NotAllowed(InfrastructureError):
    """This user may not set filters."""


class _Gate:
    """Announces this rank's connection attempts, and admits the attempts of the other ranks."""

    def __init__(self, store: Any, size: int, listener: Any) -> None:
        self._store = store
        self._has_others = size > 1
        self._fd = listener.fd
        self._address: _End = tuple(listener.laddr)
        self._admitted: list[_End] = []
        self._announced: set[_Dial] = set()
        self._restrict()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        # A group of one rank has no other to admit.
        if self._has_others:
            self._thread.start()

    def close(self) -> None:
        """Drop every further connection."""
        self._is_over.set()
        if self._has_others:
            self._thread.join()
        self._restrict()

    def _restrict(self) -> None:
        try:
            admit(self._fd, ())
        except _NotAllowed:
            # A group of one has no rank for which a stranger could pass.
            if self._has_others:
                raise
            _log.warning("any local user can connect to gloo's listener %s", self._address)

    def check(self) -> None:
        """Raise InfrastructureError if a peer is connected that is not an announced rank."""
        for end in _sockets(psutil.CONN_ESTABLISHED):
            if tuple(end.laddr) == self._address and tuple(end.raddr) not in self._admitted:
                raise InfrastructureError(
                    f"a stranger at {end.raddr} connected to gloo's listener {self._address} before"
                    " it was closed; find and end that process, then try again"
                )

    def hang_up(self) -> None:
        """Close the connections of this rank to the other ranks; calls that use them fail."""
        for end in _sockets(psutil.CONN_ESTABLISHED):
            ends = (tuple(end.laddr), tuple(end.raddr))
            if ends[0] == self._address or ends in self._announced:
                # gloo may close it at the same time.
                with contextlib.suppress(OSError):
                    _shut(end.fd)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._announce()
            before = len(self._admitted)
            # Numbered from 1. None is removed: `check` accepts the peers that were admitted once.
            while self._store.check([key := _dial(self._address, len(self._admitted) + 1)]):
                self._admitted.append(msgspec.json.decode(self._store.get(key), type=_End))
            if len(self._admitted) > before:
                admit(self._fd, self._admitted)

    def _announce(self) -> None:
        for end in _sockets(psutil.CONN_SYN_SENT):
            dial = (tuple(end.laddr), tuple(end.raddr))
            if dial not in self._announced:
                self._announced.add(dial)
                number = self._store.add(_dials(end.raddr), 1)
                self._store.set(_dial(end.raddr, number), msgspec.json.encode(end.laddr))


def _shut(fd: int) -> None:
    # Not a copy of the descriptor: gloo relies on its own one being the last, and would abort.
    connection = socket.socket(fileno=fd)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def _dials(target: _End) -> str:
    return f"dials to {target[0]}:{target[1]}"


def _dial(target: _End, number: int) -> str:
    return f"{_dials(target)}, {number}"


def _listeners() -> dict[int, Any]:
    """Return the listening sockets of this process by inode: the number of a descriptor that
    another thread closes may be the next listener's.
    """
    found = {}
    for end in _sockets(psutil.CONN_LISTEN):
        with contextlib.suppress(OSError):  # closed since
            found[os.fstat(end.fd).st_ino] = end
    return found


def _sockets(status: str) -> list[Any]:
    # gloo listens at an IPv4 address of the run.
    connections = psutil.Process().net_connections("tcp4")
    return [end for end in connections if end.status == status]


def admit(fd: int, sources: Collection[_End]) -> None:
    """Let the kernel drop every packet to a listening socket, except from these addresses. Raises
    InfrastructureError if they do not fit a filter.

    The kernel copies the filter to each accepted socket, where it continues to match.
    """
    program = _program(sources)
    steps = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
        except PermissionError as error:
            raise _NotAllowed(
                "this kernel lets only users with CAP_NET_ADMIN close gloo's listener to strangers,"
                " which several learner ranks need; run as root, give the capability, or set"
                " learner.ranks=1"
            ) from error
        except OSError as error:
            limit = Path("/proc/sys/net/core/optmem_max").read_text().strip()
            raise InfrastructureError(
                f"a filter of the kernel cannot hold {len(sources)} ranks of gloo"
                f" ({error.strerror}, net.core.optmem_max={limit}); raise the limit with sysctl -w"
                " net.core.optmem_max=131072, or use fewer ranks"
            ) from error


def _program(sources: Collection[_End]) -> bytes:
    """Return the filter: an address is compared once, then the ports of its ranks."""
    ports = collections.defaultdict(list)
    for address, port in sources:
        ports[address].append(port)
    # The port in memory, the address in A and in X.
    program = _step(_LD_HALF, _SOURCE_PORT) + _step(_STORE, 0)
    program += _step(_LD_WORD, _SOURCE_ADDRESS) + _step(_A_TO_X, 0)
    for address, all_ports in ports.items():
        (word,) = struct.unpack("!I", socket.inet_aton(address))
        for first in range(0, len(all_ports), _MOST_COMPARED):
            part = all_ports[first : first + _MOST_COMPARED]
            program += _step(_JUMP_EQUAL, word, if_not=len(part) + 3) + _step(_LD_MEMORY, 0)
            for left, port in zip(range(len(part) - 1, -1, -1), part, strict=True):
                program += _step(_JUMP_EQUAL, port, if_equal=left, if_not=0 if left else 1)
            program += _step(_RETURN, _ACCEPT) + _step(_X_TO_A, 0)
    return program + _step(_RETURN, _DROP)


def _step(code: int, value: int, *, if_equal: int = 0, if_not: int = 0) -> bytes:
    """Encode one instruction. A comparison skips that many instructions after it."""
    return struct.pack("=HBBI", code, if_equal, if_not, value)
