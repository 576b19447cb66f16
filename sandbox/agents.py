"""An agent in a jail: a process that enters every namespace of the kernel and becomes a command.

The command sees nothing of the host except /usr, the interpreter and the readable paths, all
read-only. It can write to /tmp, which is its home and is gone after it, and its network is a
loopback of its own. There it reaches one address: a listener at this port, which is sent through
the descriptor (a socket) to who started the process (`cell.entry`). When the command exits, the
kernel ends all that it has started.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from . import linux, namespaces

_SCRATCH_BYTES = 1 << 30
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def main(port: int, descriptor: int, readable: Sequence[str], command: Sequence[str]) -> None:
    """Become the command. Raises OSError if the kernel or a policy refuses."""
    # The files of a run are private, but the user of the jail has to read its root.
    os.umask(0o022)
    namespaces.become_first_process(readable, os.getppid(), descriptor)
    linux.mount(
        "scratch",
        namespaces.SCRATCH,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"size={_SCRATCH_BYTES},mode=0777",
    )
    with socket.socket() as probe:
        # The kernel keeps the other flags of the loopback, which say what kind of interface it is.
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    listener = socket.create_server(("127.0.0.1", port))
    with listener, socket.socket(fileno=descriptor) as host:
        socket.send_fds(host, [b"l"], [listener.fileno()])
    os.chdir(namespaces.SCRATCH)
    agent = os.fork()
    # End with the agent; collect other processes that it leaves.
    while agent:
        process, status = os.wait()
        if process == agent:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # An execve would give the rights of root in these namespaces back.
    linux.drop_capability_bounds()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    os.execvp(command[0], list(command))
