"""The requests of one training run, and what its learner has of them.

Invariants
- The requests of a run are executed in the order of their numbers, one at a time.
- A learner that has lost requests of a run gets its newest whole state, and again those after it
  that changed the run, in order.
"""

import logging
import shutil
from pathlib import Path
from typing import cast

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError
from async_rl.protocol.service import CHANGING, Execute, Executed, Operation
from async_rl.service.address import folder_of
from async_rl.service.processes import Processes
from async_rl.service.store import Request, Store

_log = logging.getLogger(__name__)
_SAVE_S = 10.0
"""Seconds of work after which the state of a run is saved: a kill repeats about that much."""
_PREFIX = "state-"
_KEPT = 2


class Line:
    """work: tokens so far."""

    def __init__(self, run_id: str, store: Store, backend: Processes) -> None:
        self.run_id = run_id
        self.folder = store.directory / "runs" / folder_of(run_id)
        self._store = store
        self._backend = backend
        self.work = 0
        self.is_known = False
        """The learner has executed all that is answered."""
        self._unsaved_s = 0.0
        """Work that no state has."""
        self._has_gradients = False

    async def leave(self) -> None:
        """Free the memory of the learner, until the next request of the run."""
        if self.is_known:
            await self.save()
            await self._call("restore")
            self.is_known = False

    async def execute(self, request: Request, directory: str, step: int) -> Executed:
        """Execute the next request, after those that the learner has lost. Raises DataError if it
        is refused.
        """
        if not self.is_known:
            await self._repeat()
        executed = await self._call(request.kind, directory, request.body, step)
        self.work += executed.tokens
        if executed.error:
            raise DataError(executed.error)
        return executed

    async def answered(self, request: Request) -> None:
        """Save and forget what is due now that this request has its answer in the store."""
        if request.kind == "unload_model":
            self.is_known = False
            self._forget(request.seq_id)
        elif request.kind == "optim_step" and self._unsaved_s >= _SAVE_S:
            await self.save()

    def _states(self) -> list[tuple[int, Path]]:
        """Return the states and the newest request that each one has, the newest first."""
        found = self.folder.glob(f"{_PREFIX}*[0-9]")
        return sorted(((int(p.name.removeprefix(_PREFIX)), p) for p in found), reverse=True)

    async def save(self) -> None:
        """Save the state, unless gradients wait for their step, and delete what two states make
        superfluous: a damage of one of them then requires no request before the other.
        """
        if self._has_gradients or not self._unsaved_s:
            return
        newest = self._store.next_seq(self.run_id) - 1
        saved = await self._call("save_state", self.folder / f"{_PREFIX}{newest}")
        if saved.error:
            # The requests remain, so a full disk loses nothing.
            _log.warning("%s: %s", self.run_id, saved.error)
            return
        self._unsaved_s = 0.0
        states = self._states()
        for _, path in states[_KEPT:]:
            shutil.rmtree(path)
        if len(states) >= _KEPT:
            self._forget(states[_KEPT - 1][0])

    def _forget(self, seq_id: int) -> None:
        query = "UPDATE requests SET body=NULL WHERE owner=? AND seq_id<=? AND body IS NOT NULL"
        self._store.change(query, self.run_id, seq_id)

    async def _repeat(self) -> None:
        """Execute again what the newest whole state lacks. Raises DataError if that is impossible:
        all states are damaged, and the requests that they have are gone.
        """
        damaged: list[tuple[Path, str]] = []
        first = 0
        for seq_id, path in self._states():
            restored = await self._call("restore", path)
            if not restored.error:
                first = seq_id + 1
                break
            _log.error("%s: %s", self.run_id, restored.error)
            damaged.append((path, restored.error))
        else:
            await self._call("restore")
        self._unsaved_s = 0.0
        self._has_gradients = False
        done = "owner=? AND seq_id>=? AND answered_s IS NOT NULL AND error='' ORDER BY seq_id"
        lacking = self._store.all(Request, done, self.run_id, first)
        for request in lacking:
            if request.kind not in CHANGING:
                continue
            if request.body is None:
                reason = damaged[0][1] if damaged else "its states are gone"
                raise DataError(f"{self.run_id} is lost: {reason}; load its newest checkpoint")
            executed = await self._call(request.kind, request.directory, request.body)
            if checksum(executed.body) != request.outcome:
                _log.error("%s was answered in another way before", request.request_id)
        for path, _ in damaged:
            # Its name becomes free, and it no longer counts as a state.
            path.rename(path.with_name(f"damaged-{path.name}"))
        self.is_known = True

    async def _call(
        self, kind: str, path: Path | str = "", body: bytes | None = None, step: int = 0
    ) -> Executed:
        request = Execute(
            run_id=self.run_id,
            operation=cast(Operation, kind),
            body=body or b"",
            path=str(path),
            step=step,
        )
        started_s = self._store.now()
        executed = await self._backend.execute(request)
        if kind in CHANGING and not executed.error:
            self._unsaved_s += self._store.now() - started_s
            self._has_gradients = kind == "forward_backward"
        return executed
