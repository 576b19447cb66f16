"""The learner and the generators of a service across their restarts: calls of them, and what the
learner has of each training run.

Invariants
- The requests of a run are executed in the order of their numbers, one at a time.
- A learner that has lost requests of a run gets its newest whole state, and again those after it
  that changed the run, in order.
"""

import collections
import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any, cast

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError, Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.service import (
    CHANGING,
    Execute,
    Executed,
    LoadSlot,
    Operation,
    Sample,
    Sampled,
)
from async_rl.protocol.supervisor import DRAINING, Member
from async_rl.runtime.context import ProcessContext
from async_rl.service.address import folder_of
from async_rl.service.store import Request, Store
from async_rl.weights.membership import Life, life_of

_LONGEST_S = 3600.0
"""A request takes minutes at most; a process that hangs is ended by the supervisor before this."""
_SAVE_S = 10.0
"""Seconds of work after which the state of a run is saved: a kill repeats about that much."""
_PREFIX = "state-"
_KEPT = 2
_log = logging.getLogger(__name__)


class Processes:
    """Calls the learner and the generators, whichever life each of them has."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._directory = context.directory
        self._learner: Member | None = None
        """The life that has executed the requests so far."""
        self._busy = collections.Counter[Life]()
        self._broken: set[Life] = set()

    async def execute(self, request: Execute) -> Executed:
        """Let the learner execute a request. Unavailable if it left: its successor, which executes
        the next request, has no run.
        """
        while self._learner is None:
            self._learner = self._directory.find("learner")
            if self._learner is None:
                await self._wait_for("the learner")
        try:
            executed: Executed = await self._call(self._learner, request)
        except Unavailable:
            self._learner = None
            raise
        return executed

    async def _call(self, member: Member, request: Message) -> Any:
        return await self._context.incarnation_of(member).call(request, timeout_s=_LONGEST_S)

    async def _wait_for(self, process: str) -> None:
        with self._context.activity.waiting(process):
            await self._directory.changed(self._directory.revision)

    async def sample(self, request: Sample) -> Sampled:
        """Let the least busy generator draw the sequences, another one if it leaves."""
        while True:
            usable = {
                life_of(member): member
                for member in self._directory.of_role("generator")
                if member.state != DRAINING and life_of(member) not in self._broken
            }
            if not usable:
                await self._wait_for("a generator")
                continue
            life = min(usable, key=self._busy.__getitem__)
            self._busy[life] += 1
            try:
                sampled: Sampled = await self._call(usable[life], request)
                return sampled
            except Unavailable as error:
                _log.warning("sample %s moves: %s", request.request_id, error)
                self._broken.add(life)
            finally:
                self._busy[life] -= 1

    async def load(self, request: LoadSlot) -> None:
        """Let the policy continue with these weights on every generator; others load what a sample
        names. Raises DataError if a generator refuses them.
        """
        for member in self._directory.of_role("generator"):
            # One that leaves has a successor, which is one of the others.
            with contextlib.suppress(Unavailable):
                await self._call(member, request)


class Line:
    """One training run. work: tokens so far."""

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
