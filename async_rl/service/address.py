"""The address of a service: a port and a key that outlive the front's process, so that a program
continues when the front, or the whole service, starts again; and what readers of its folder need.
"""

import secrets
from pathlib import Path

import msgspec

from async_rl.core.os import write_private
from async_rl.wire.addresses import LOOPBACK

FOLDER = "service"
"""Folder of a service in the run's directory."""
STORE_FILE = "requests.sqlite"
"""Name of the table of requests in that folder."""
_FILE = "address.json"


class Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where programs find the service, and the key that they send."""

    port: int
    api_key: str


def folder_of(run_id: str) -> str:
    """Return the name of a run's folder, which is the slot of its in-flight samplers too."""
    return run_id.replace(":", ".")


def free_port(port: int) -> int:
    """Return a port that can be bound. port: 0 = any. Raises ConfigError if it is in use."""
    # The command line imports this module, and only a service needs the packages of a server.
    from async_rl.wire.http import listen

    with listen(LOOPBACK, port) as listener:
        found: int = listener.getsockname()[1]
        return found


def address_of(run_dir: Path, port: int = 0) -> Address:
    """Return the address of the service; the first call decides it. port: 0 = a free one. Raises
    ConfigError if the port is in use.
    """
    file = run_dir / FOLDER / _FILE
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Address)
    # The client refuses a key that starts with anything else.
    address = Address(port=free_port(port), api_key=f"tml-{secrets.token_urlsafe(24)}")
    file.parent.mkdir(mode=0o700, exist_ok=True)
    # Whole or not at all: a front that is killed here must be able to start again.
    write_private(file, msgspec.json.encode(address))
    return address
