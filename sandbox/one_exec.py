"""Exactly one execve for a child, by the kernel's own count.

The child installs a filter that notifies a listener before each execveat. Its zygote owns the
listener: it lets the first call continue and closes the listener, after which the kernel refuses
each later call. A filter alone could not count, and a filter of argument values could be met again
by the program that was started.
"""

from __future__ import annotations

import _socket
import array
import fcntl
import select
import struct

from . import linux
from .seccomp import EXECVEAT, RET_ALLOW

_SYS_SECCOMP = 317
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RET_USER_NOTIF = 0x7FC00000
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIF_BYTES = 80
_CONTINUE = 1
_PROGRAM = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, EXECVEAT),
        (0x06, 0, 0, _RET_USER_NOTIF),
        (0x06, 0, 0, RET_ALLOW),
    )
)


def ask_before_exec(zygote: _socket.socket) -> None:
    """In the child: from now on an execveat waits for the zygote, which gets the listener.

    The child's own copy of the listener closes with the execveat. Raises OSError.
    """
    head = linux.filter_head(_PROGRAM)
    listener = linux.syscall("seccomp", _SYS_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, head)
    rights = array.array("i", [listener])
    zygote.sendmsg([b"l"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])


def allow_one(child: _socket.socket, process: int) -> bool:
    """In the zygote: let one execveat of the child continue, and close the listener.

    process: pidfd of the child. False if the child exited before.
    """
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.register(child.fileno(), select.POLLIN)
    if not _is_ready(poller, child.fileno()):
        return False
    _, ancillary, _, _ = child.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    if not ancillary:
        return False
    (listener,) = struct.unpack("i", ancillary[0][2][:4])
    with open(listener, "rb", buffering=0) as owned:
        poller.unregister(child.fileno())
        poller.register(owned.fileno(), select.POLLIN)
        if not _is_ready(poller, owned.fileno()):
            return False
        asked = bytearray(_NOTIF_BYTES)
        fcntl.ioctl(owned, _NOTIF_RECV, asked, True)
        (call,) = struct.unpack_from("Q", asked)
        # The listener closes right after this answer, so the kernel has nobody to ask again.
        fcntl.ioctl(owned, _NOTIF_SEND, struct.pack("QqiI", call, 0, 0, _CONTINUE))
    return True


def _is_ready(poller: select.poll, descriptor: int) -> bool:
    """Wait for one of the registered descriptors; True if `descriptor` can be read."""
    return any(fd == descriptor and event & select.POLLIN for fd, event in poller.poll())
