"""The address that a process binds and announces. The supervisor and every other process must reach
it.

Invariants
- The kernel chooses the address: it is the local end of the route to the supervisor. A supervisor
  on loopback is reached from loopback, so a run on one machine stays there.
- Servers without a password (TensorBoard, Prometheus) stay on loopback unless network.host names an
  address.
"""

import socket

import psutil

from async_rl.config.run import NetworkConfig
from async_rl.core.errors import ConfigError, Unavailable

LOOPBACK = "127.0.0.1"
AUTO = "auto"


def supervisor_host(network: NetworkConfig, discovered: str) -> str:
    """Return the address that the supervisor binds.

    discovered: this machine's address, as the launcher reports it.
    """
    if network.host != AUTO:
        return network.host
    if network.interface is None:
        return discovered
    return host_of_interface(network.interface)


def process_host(network: NetworkConfig, supervisor_address: str) -> str:
    """Return the address that any other process binds: the local end of the route to the
    supervisor, or the address of `network.interface`. Raises Unavailable without a route.
    """
    host, _, port = supervisor_address.removeprefix("tcp://").rpartition(":")
    if network.interface is not None and host != LOOPBACK:
        return host_of_interface(network.interface)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A connected UDP socket sends nothing; the kernel only chooses the route.
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no route from this machine to the supervisor at {supervisor_address}: {error}; set"
            " network.interface"
        ) from error


def host_for_people(network: NetworkConfig) -> str:
    """Return the address that TensorBoard, Prometheus and a standalone verifier bind."""
    return LOOPBACK if network.host == AUTO else network.host


def host_of_interface(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises ConfigError without one."""
    interfaces = psutil.net_if_addrs()
    # The ZeroMQ sockets of a run are IPv4 sockets.
    for address in interfaces.get(interface, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ConfigError(
        f"network.interface={interface}: has no IPv4 address on {socket.gethostname()}; use one of"
        f" {', '.join(sorted(interfaces))}, or null for the route to the supervisor"
    )
