"""An agent in a jail: a script that enters every namespace of the kernel and becomes a command.

    python agents.py '[port, descriptor, [readable], [command]]'

The command sees nothing of the host except /usr, the interpreter and the readable paths, all
read-only. It can write to /tmp, which is its home and is gone after it, and its network is a
loopback of its own. There it reaches one address: a listener at this port, which is sent through
the descriptor (a socket) to who started the script. When the command exits, the kernel ends all
that it has started.
"""

import fcntl
import importlib
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence

_SCRATCH_BYTES = 1 << 30
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PR_SET_NO_NEW_PRIVS = 38


def main(
    package: str, port: int, descriptor: int, readable: Sequence[str], command: Sequence[str]
) -> None:
    """Become the command. Raises OSError if the kernel or a policy refuses."""
    linux = importlib.import_module(f"{package}.linux")
    namespaces = importlib.import_module(f"{package}.namespaces")
    host_process = os.getppid()
    namespaces.enter(readable)
    # After the change of the user, which forgets it.
    linux.die_with(host_process)
    # The first process: the kernel ends all others when it exits.
    inner = os.fork()
    if inner:
        os.close(descriptor)
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.prepare_death_with_parent()()
    linux.mount(
        "scratch",
        namespaces.SCRATCH,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"size={_SCRATCH_BYTES},mode=0777",
    )
    with socket.socket() as probe:
        _bring_up(probe, b"lo")
    listener = socket.create_server(("127.0.0.1", port))
    with listener, socket.socket(fileno=descriptor) as host:
        socket.send_fds(host, [b"l"], [listener.fileno()])
    os.chdir(namespaces.SCRATCH)
    agent = os.fork()
    if agent:
        _wait_for(agent)
    # An execve would give the rights of root in these namespaces back.
    linux.drop_capability_bounds()
    linux.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    os.execvp(command[0], list(command))


def _wait_for(agent: int) -> None:
    """End with the agent; collect other processes that it leaves."""
    while True:
        process, status = os.wait()
        if process == agent:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _bring_up(probe: socket.socket, name: bytes) -> None:
    request = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))
    (flags,) = struct.unpack("16xH14x", request)
    fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | _IFF_UP))


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    # Last: a neighbour of an installed package may have the name of a standard module.
    sys.path.append(os.path.dirname(folder))
    main(os.path.basename(folder), *json.loads(sys.argv[1]))
