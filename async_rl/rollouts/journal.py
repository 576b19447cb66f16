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
- The requests of a session that a program outside the run has taken are written before their
  answers leave. The next life of the same gateway repeats them, and the program goes on.
"""

import base64
import contextlib
import hashlib
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.core.codec import decode, encode
from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import Value
from async_rl.core.os import write_private
from async_rl.core.types import IntArray, Sampling, Ticket
from async_rl.protocol.generator import Completion
from async_rl.sessions.calls import Noted

_LIFE = "records-of-life-"


class _Request(Value, tag=True):
    """A request of a session that a program has taken. name: of the session."""

    name: str
    noted: Noted


class _Record(Value, tag=True):
    """One answer. before: the digest of the tokens that it continues and of its support."""

    attempt: int
    sample: int
    before: bytes
    completed: Completion


_LINE: Any = _Record | _Request


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
        self.returning: dict[str, list[Noted]] = defaultdict(list)
        """The requests of the sessions that programs took from an earlier life, by their names."""
        for file in self._folder.glob("[0-9]*"):
            for line in self._lines(file):
                if isinstance(line, _Request):
                    self.returning[line.name].append(line.noted)

    @property
    def secret(self) -> bytes:
        """The secret of the gateway's keys, the same in all its lives."""
        file = self._folder / "secret"
        if not file.exists():
            write_private(file, secrets.token_bytes())
        return file.read_bytes()

    def name_of(self, ticket: Ticket, sample: int) -> str:
        """Return the name of a session: of the one that comes back, or a new one."""
        for name in self.returning:
            group, _, index = name.split(".")
            if (int(group), int(index)) == (ticket.group_id, sample):
                return name
        return f"{ticket.group_id}.{ticket.attempt}.{sample}"

    def note(self, name: str, noted: Noted) -> None:
        """Write a request of a session. Raises InfrastructureError."""
        self._append(int(name.partition(".")[0]), _Request(name=name, noted=noted))

    def take(
        self, ticket: Ticket, sample: int, before: IntArray, sampling: Sampling
    ) -> Completion | None:
        """Return what another life wrote here, with at most the tokens of the limit; None if
        nothing. An answer that its limit ended may have fewer, and the caller continues it.
        """
        if ticket.group_id not in self._known:
            self._known[ticket.group_id] = self._read(ticket.group_id)
        known = self._known[ticket.group_id]
        digest = _digest(before, sampling)
        for index, record in enumerate(known):
            is_same = (record.sample, record.before) == (sample, digest)
            if is_same and len(record.completed.token_ids) <= sampling.max_new_tokens:
                return known.pop(index).completed
        return None

    def add(
        self,
        ticket: Ticket,
        sample: int,
        before: IntArray,
        sampling: Sampling,
        completed: Completion,
    ) -> None:
        """Write one answer. In the page cache it survives the process, not the machine. Raises
        InfrastructureError.
        """
        record = _Record(
            attempt=ticket.attempt,
            sample=sample,
            before=_digest(before, sampling),
            completed=completed,
        )
        self._append(ticket.group_id, record)

    def _append(self, group_id: int, record: _Record | _Request) -> None:
        # As text, so that a line break shows where a record is complete.
        line = base64.b64encode(encode(record)) + b"\n"
        with (self._folder / str(group_id)).open("ab", buffering=0) as file:
            size = file.tell()
            try:
                # The disk may have room for a part of it.
                while line:
                    line = line[file.write(line) :]
            except OSError as error:
                file.truncate(size)
                raise InfrastructureError(
                    f"{file.name} cannot be written: {error.strerror}; free space there"
                ) from error

    def forget(self, group_id: int) -> None:
        """Remove the records of a group."""
        self._known.pop(group_id, None)
        for name in [name for name in self.returning if name.startswith(f"{group_id}.")]:
            del self.returning[name]
        for file in self._files(group_id):
            file.unlink(missing_ok=True)

    def _read(self, group_id: int) -> list[_Record]:
        """The records of other lives, the newest attempt first: its agent saw them."""
        lines = [line for file in self._files(group_id) for line in self._lines(file)]
        records = [line for line in lines if isinstance(line, _Record)]
        return sorted(records, key=lambda record: -record.attempt)

    def _lines(self, file: Path) -> Sequence[_Record | _Request]:
        # Another gateway may remove its file at any time.
        with contextlib.suppress(FileNotFoundError):
            data = file.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            # The records of this life follow; behind half a record they could not be read.
            if file.parent == self._folder:
                os.truncate(file, len(whole))
            return [decode(base64.b64decode(line), _LINE) for line in whole.splitlines()]
        return []

    def _files(self, group_id: int) -> list[Path]:
        """The files of the group, of all gateways that share this directory."""
        life = self._folder
        return list(life.parent.parent.glob(f"*/{life.name}/{group_id}"))


def _digest(token_ids: IntArray, sampling: Sampling) -> bytes:
    how = encode(sampling.support) + encode(sampling.alternatives)
    content = token_ids.astype("<i4").tobytes() + how
    return hashlib.blake2b(content, digest_size=16).digest()
