"""Which address a process binds and announces: the one by which the supervisor, and so everyone
else, reaches its machine.

Invariants
- Nothing is assumed: a process asks the kernel which of its addresses leads to the supervisor.  A
  supervisor on loopback is reached from loopback, so a run on one machine stays there.
- What serves people without a password (TensorBoard, Prometheus) stays on loopback unless
  network.host names an address.
Used by every process that serves, and by the launchers.
"""

from __future__ import annotations

import socket

import psutil

from async_rl.config.running import NetworkConfig
from async_rl.core.errors import ConfigError, Unavailable

LOOPBACK = "127.0.0.1"
AUTO = "auto"


def supervisor_host(network: NetworkConfig, discovered: str) -> str:
    """Where the supervisor binds. discovered: the address by which the launcher says that others
    reach this machine.
    """
    if network.host != AUTO:
        return network.host
    return discovered if network.interface is None else host_of_interface(network.interface)


def process_host(network: NetworkConfig, supervisor_address: str) -> str:
    """Where any other process binds: its address towards the supervisor, or that of
    `network.interface`. Raises Unavailable without one.
    """
    host, _, port = supervisor_address.removeprefix("tcp://").rpartition(":")
    if network.interface is not None and host != LOOPBACK:
        return host_of_interface(network.interface)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(
                (host, int(port))
            )  # UDP: nothing is sent, the kernel only chooses the way
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no way from this machine to the supervisor at {supervisor_address}: {error}; set"
            " network.interface"
        ) from error


def host_for_people(network: NetworkConfig) -> str:
    """Where TensorBoard, Prometheus and a verifier of its own bind."""
    return LOOPBACK if network.host == AUTO else network.host


def host_of_interface(interface: str) -> str:
    """The IPv4 address of a network interface of this machine. Raises ConfigError if there is none."""
    interfaces = psutil.net_if_addrs()
    for address in interfaces.get(interface, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ConfigError(
        f"network.interface={interface}: has no IPv4 address on {socket.gethostname()}; give one of"
        f" {', '.join(sorted(interfaces))}, or null to choose by the way to the supervisor"
    )
