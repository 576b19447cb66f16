"""The secrets of one run: a CURVE key pair for its servers, one for its clients, and a bearer token
for HTTP.

They are created at launch, stored in `<run>/keys/` with access for the owner only, and never sent.
A socket accepts only clients with the run's client key, so two runs on one machine cannot talk to
each other by mistake.
"""

import hashlib
import secrets
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from async_rl.core.errors import Unavailable
from async_rl.core.frozen import Value
from async_rl.core.os import write_private


class Keys(Value):
    """Z85-encoded CURVE keys and the HTTP token of a run."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    token: str


def derived_keys(secret: str) -> Keys:
    """Return the keys of a server whose clients know the same secret and nothing else."""

    def pair(role: str) -> tuple[str, str]:
        private = z85.encode(hashlib.sha256(f"{role} {secret}".encode()).digest())
        return zmq.curve_public(private).decode(), private.decode()

    server_public, server_secret = pair("server")
    client_public, client_secret = pair("client")
    return Keys(
        server_public=server_public,
        server_secret=server_secret,
        client_public=client_public,
        client_secret=client_secret,
        token="",
    )


def create_keys(directory: Path) -> Keys:
    """Create new keys and write them to `directory`/keys.json with mode 600."""
    # One pair for all clients of the run: keys of single processes would have to be distributed
    # while it runs. The token is sent over HTTP, so it shares no secret with the keys.
    keys = msgspec.structs.replace(
        derived_keys(secrets.token_hex()), token=secrets.token_urlsafe(32)
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(directory / "keys.json", msgspec.json.encode(keys))
    return keys


def load_keys(directory: Path) -> Keys:
    """Read the keys of `create_keys`. Raises Unavailable if they are missing or not readable."""
    path = directory / "keys.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Keys)
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(f"the run's keys at {path} cannot be read: {error}") from error
