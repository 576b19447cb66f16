"""The policy's answers in the open groups of a gateway, on disk before an agent sees them.

A gateway that is killed loses its sessions and the environments. Its groups are issued again, to
its successor or to another gateway, and their agents start again; as long as they repeat their
calls, that gateway answers with the tokens, log-probs and versions that the journals have, and the
rest is drawn as usual.

Invariants
- A record is written before its tokens leave the gateway, so an agent never saw an answer that the
  journal lacks. The end of a file that a kill cut off is ignored: no agent saw it.
- A life of a gateway answers only with records of other lives, of this or of other gateways,
  each at most once, and only to the same sample after exactly the same tokens.
- The records of a group in all gateways are removed before its attempt fails, so a failed
  attempt is never repeated, and after the buffer has a complete group.
- A gateway writes only to its own file of a group: one that has lost its lease may still write.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from async_rl.core.codec import decode, encode
from async_rl.core.frozen import Value
from async_rl.core.support import Support
from async_rl.core.types import IntArray, Ticket
from async_rl.protocol.generator import Completion

_LIFE = "records-of-life-"


class _Record(Value, frozen=True):
    """One answer. before: the digest of the tokens that it continues and of its support."""

    attempt: int
    sample: int
    before: bytes
    completed: Completion


class Journal:
    """The records of the open groups, one file each. folder: of this gateway, next to the folders
    of other gateways. life: of the supervisor; the records of other ones are removed, because a
    resumed run may have gone back to older weights.
    """

    def __init__(self, folder: Path, life: str) -> None:
        self._folder = folder / f"{_LIFE}{life}"
        # Only folders of journals: whatever else lies next to this gateway's is not ours.
        for other in folder.parent.glob(f"*/{_LIFE}*"):
            # Another gateway may start at the same time and remove it too.
            if other.name != self._folder.name:
                shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[int, list[_Record]] = {}

    def take(
        self, ticket: Ticket, sample: int, before: IntArray, limit: int, support: Support
    ) -> Completion | None:
        """Return what another life wrote here, with at most `limit` tokens; None if nothing. An
        answer that its limit ended may have fewer, and the caller continues it.
        """
        if ticket.group_id not in self._known:
            self._known[ticket.group_id] = self._read(ticket.group_id)
        known = self._known[ticket.group_id]
        digest = _digest(before, support)
        for index, record in enumerate(known):
            is_same = (record.sample, record.before) == (sample, digest)
            if is_same and len(record.completed.token_ids) <= limit:
                return known.pop(index).completed
        return None

    def add(
        self,
        ticket: Ticket,
        sample: int,
        before: IntArray,
        support: Support,
        completed: Completion,
    ) -> None:
        """Write one answer. In the page cache it survives the process, not the machine."""
        record = _Record(
            attempt=ticket.attempt,
            sample=sample,
            before=_digest(before, support),
            completed=completed,
        )
        # As text, so that a line break shows where a record is complete.
        line = base64.b64encode(encode(record)) + b"\n"
        with self._file(ticket.group_id).open("ab", buffering=0) as file:
            file.write(line)

    def forget(self, group_id: int) -> None:
        """Remove the records of a group."""
        self._known.pop(group_id, None)
        for file in self._files(group_id):
            file.unlink(missing_ok=True)

    def _read(self, group_id: int) -> list[_Record]:
        """The records of other lives, the newest attempt first: its agent saw them."""
        records = []
        for file in self._files(group_id):
            # Another gateway may remove its file at any time.
            with contextlib.suppress(FileNotFoundError):
                data = file.read_bytes()
                whole = data[: data.rfind(b"\n") + 1]
                records += [decode(base64.b64decode(line), _Record) for line in whole.splitlines()]
                # The records of this life follow; behind half a record they could not be read.
                if file == self._file(group_id):
                    os.truncate(file, len(whole))
        return sorted(records, key=lambda record: -record.attempt)

    def _files(self, group_id: int) -> list[Path]:
        """The files of the group, of all gateways that share this directory."""
        life = self._folder
        return list(life.parent.parent.glob(f"*/{life.name}/{group_id}"))

    def _file(self, group_id: int) -> Path:
        return self._folder / str(group_id)


def _digest(token_ids: IntArray, support: Support) -> bytes:
    content = token_ids.astype("<i4").tobytes() + encode(support)
    return hashlib.blake2b(content, digest_size=16).digest()
