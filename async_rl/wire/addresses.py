"""The address that a process binds and announces. The supervisor and every other process must reach
it.

Invariants
- The kernel chooses the address: it is the local end of the route to the supervisor. A supervisor
  on loopback is reached from loopback, so a run on one machine stays there.
- Servers without a password (TensorBoard, Prometheus) stay on loopback unless network.host names an
  address.
"""

import ipaddress
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
    if _names_interface(network):
        return host_of_interface(network.host)
    return discovered if network.host == AUTO else network.host


def process_host(network: NetworkConfig, supervisor_address: str) -> str:
    """Return the address that any other process binds: the local end of the route to the
    supervisor, or the address of the interface `network.host`. Raises Unavailable without a route.
    """
    host, _, port = supervisor_address.removeprefix("tcp://").rpartition(":")
    if host != LOOPBACK and _names_interface(network):
        return host_of_interface(network.host)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A connected UDP socket sends nothing; the kernel only chooses the route.
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no route from this machine to the supervisor at {supervisor_address}: {error}; set"
            " network.host to a network interface that all machines have"
        ) from error


def host_for_people(network: NetworkConfig) -> str:
    """Return the address that TensorBoard, Prometheus and a standalone verifier bind."""
    is_address = network.host != AUTO and not _names_interface(network)
    return network.host if is_address else LOOPBACK


def _names_interface(network: NetworkConfig) -> bool:
    try:
        ipaddress.ip_address(network.host)
    except ValueError:
        return network.host != AUTO
    return False


def host_of_interface(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises ConfigError without one."""
    interfaces = psutil.net_if_addrs()
    # The ZeroMQ sockets of a run are IPv4 sockets.
    for address in interfaces.get(interface, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ConfigError(
        f"network.host={interface}: is neither an address nor a network interface with an IPv4"
        f" address on {socket.gethostname()}; use an address, one of"
        f" {', '.join(sorted(interfaces))}, or auto"
    )
