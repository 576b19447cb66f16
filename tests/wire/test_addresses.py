"""Facts about the address that a process binds and announces."""

import socket

import psutil
import pytest
from composing import compose

from async_rl.config.base import replace
from async_rl.config.run import NetworkConfig
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.wire.addresses import host_for_people, process_host, supervisor_host

AUTOMATIC = compose("ppo_code").network


def network(**settings: str) -> NetworkConfig:
    return replace(AUTOMATIC, **settings)


def own_address() -> tuple[str, str]:
    """(interface, IPv4 address) of this machine other than loopback."""
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return interface, address.address
    pytest.skip("this machine has no address besides loopback")


def test_a_process_binds_the_address_from_which_it_reaches_the_supervisor() -> None:
    interface, address = own_address()
    assert process_host(AUTOMATIC, "tcp://127.0.0.1:5000") == "127.0.0.1"
    assert process_host(network(host="eth-that-is-not"), "tcp://127.0.0.1:5000") == "127.0.0.1"
    assert process_host(AUTOMATIC, f"tcp://{address}:5000") == address
    assert process_host(network(host=interface), "tcp://10.1.2.3:5000") == address
    assert process_host(network(host="10.9.9.9"), f"tcp://{address}:5000") == address
    with pytest.raises(Unavailable, match="no route from this machine"):
        process_host(AUTOMATIC, "")


def test_the_supervisor_takes_what_the_launcher_found_unless_told_otherwise() -> None:
    interface, address = own_address()
    assert supervisor_host(AUTOMATIC, "10.1.2.3") == "10.1.2.3"
    assert supervisor_host(network(host="10.9.9.9"), "10.1.2.3") == "10.9.9.9"
    assert supervisor_host(network(host=interface), "10.1.2.3") == address
    told = r"network.host=nope: is neither an address .*, one of .*lo.*, or auto"
    with pytest.raises(ConfigError, match=told):
        supervisor_host(network(host="nope"), "10.1.2.3")


def test_what_has_no_password_stays_on_loopback_unless_an_address_is_given() -> None:
    assert host_for_people(AUTOMATIC) == "127.0.0.1"
    assert host_for_people(network(host="10.9.9.9")) == "10.9.9.9"
    assert host_for_people(network(host="ib0")) == "127.0.0.1"
