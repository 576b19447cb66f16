"""The checksum of each published version of the weights, in `<run>/versions.jsonl`.

Two versions with equal checksums have the same weights in the dtype that generators get, except for
a collision of 64 bits. A version that is published again, after a return to an earlier checkpoint,
has another line; the last line is the valid one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from async_rl.core.errors import InfrastructureError

VERSIONS_FILE = "versions.jsonl"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One line. checksum: as in the manifest of the push."""

    version: int
    checksum: int


def note(run_dir: Path, published: Published) -> None:
    """Add a line. Raises InfrastructureError if the file cannot be written."""
    path = run_dir / VERSIONS_FILE
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(published) + b"\n")
    except OSError as error:
        raise InfrastructureError(
            f"{path} cannot be written: {error}; make room, then async-rl resume the run"
        ) from error


def read(run_dir: Path) -> dict[int, int]:
    """Return the checksums by version; empty if the run did not record them."""
    path = run_dir / VERSIONS_FILE
    if not path.is_file():
        return {}
    found = {}
    # Half a line is left by a power loss only: a line is one write.
    for line in path.read_bytes().splitlines():
        try:
            published = msgspec.json.decode(line, type=Published)
        except msgspec.DecodeError:
            continue
        found[published.version] = published.checksum
    return found
