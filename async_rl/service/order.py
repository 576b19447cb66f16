"""The order in which the learner executes the requests of training runs.

Invariants
- The requests of a run are executed in the order of their numbers, one at a time. Among runs the
  one with the least work is next.
- A learner that has lost requests of a run gets those that changed the run again, in order.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import msgspec

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError, Unavailable
from async_rl.protocol.service import CHANGING, Execute, Executed, Operation
from async_rl.service.answers import Answers
from async_rl.service.backend import Backend, Model
from async_rl.service.proto import parse_forward_backward
from async_rl.service.provenance import with_ages
from async_rl.service.sampling import load
from async_rl.service.store import Request, Run
from async_rl.service.work import Plan, keep, plan_of, plan_of_batch
from async_rl.sessions.errors import Refused

_log = logging.getLogger(__name__)


class _Line:
    """The requests of a run. next_seq: of the next one to execute; work: tokens so far; saved_seq:
    the newest one whose body is deleted.

    is_known: the learner has executed all before next_seq; is_held: its memory may have the run.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self.waiting: set[int] = set()
        self.work = 0
        self.saved_seq = -1
        self.is_known = False
        self.is_held = True

    @property
    def is_ready(self) -> bool:
        """Return whether the next request is there."""
        return self.next_seq in self.waiting


class Order:
    """Executes the requests of training runs. directory: of the service."""

    def __init__(
        self, answers: Answers, backend: Backend, *, model: Model, directory: Path
    ) -> None:
        self._answers = answers
        self._store = answers.store
        self._backend = backend
        self._model = model
        self._directory = directory
        self._lines: dict[str, _Line] = {}
        self._leaving: set[str] = set()
        self._has_work = asyncio.Event()
        for run in self._store.all(Run, "TRUE"):
            line = self._lines[run.run_id] = _Line()
            query = "SELECT 1 + max(seq_id) FROM requests WHERE owner=? AND answered_s IS NOT NULL"
            line.next_seq = int(self._store.number(query, run.run_id))
        for request in self._store.all(Request, "answered_s IS NULL AND kind!='sample'"):
            self._lines[request.owner].waiting.add(request.seq_id)

    def next_seq(self, run_id: str) -> int:
        """Return the number of the next request of a run to execute."""
        return self._lines[run_id].next_seq if run_id in self._lines else 0

    def put(self, run_id: str, seq_id: int) -> None:
        """Add a request, which is in the store."""
        line = self._lines.setdefault(run_id, _Line())
        if not line.is_ready:
            # A run that paused has no right to the work that it did not ask for.
            ready = [other.work for other in self._lines.values() if other.is_ready]
            line.work = max(line.work, min(ready, default=0))
        line.waiting.add(seq_id)
        self._has_work.set()

    def release(self, run_id: str) -> None:
        """Free the learner's memory of a run, until its next request."""
        if run_id in self._lines and self._lines[run_id].is_held:
            self._leaving.add(run_id)
            self._has_work.set()

    async def run(self) -> None:
        """Takes: requests of runs; waits for: one that is next in its run; woken by: put."""
        while True:
            ready = [(line.work, run_id) for run_id, line in self._lines.items() if line.is_ready]
            leaving = next((it for it in self._leaving if not self._lines[it].is_ready), None)
            try:
                if leaving is not None:
                    await self._backend.release(leaving)
                    self._leaving.remove(leaving)
                    self._lines[leaving].is_known = self._lines[leaving].is_held = False
                elif ready:
                    run_id = min(ready)[1]
                    await self._advance(run_id, self._lines[run_id])
                else:
                    self._has_work.clear()
                    await self._has_work.wait()
            except Unavailable as error:
                _log.warning("the learner left (%s); its requests are executed again", error)
                for line in self._lines.values():
                    line.is_known = False

    async def _advance(self, run_id: str, line: _Line) -> None:
        """Execute the next request of a run, after those that the learner has lost."""
        line.is_held = True
        run = self._store.known(Run, run_id)
        request = self._store.one(Request, "owner=? AND seq_id=?", run_id, line.next_seq)
        assert request is not None
        try:
            if not line.is_known:
                await self._repeat(run_id, line)
            plan = await self._plan(run, request)
            executed = await self._execute(request, plan.directory)
            line.work += executed.tokens
            if executed.error:
                raise DataError(executed.error)
            if plan.sampler is not None and plan.sampler.is_inflight:
                newest = msgspec.structs.replace(plan.sampler, version=executed.version)
                await load(self._backend, newest)
        except (DataError, Refused) as error:
            self._answers.finish(request, error=str(error))
        else:
            self._complete(request, plan, executed)
            if executed.saved_seq_id > line.saved_seq:
                self._store.change(
                    "UPDATE requests SET body=NULL WHERE owner=? AND seq_id>? AND seq_id<=?",
                    run_id,
                    line.saved_seq,
                    executed.saved_seq_id,
                )
                line.saved_seq = executed.saved_seq_id
        line.waiting.remove(request.seq_id)
        line.next_seq += 1

    async def _plan(self, run: Run, request: Request) -> Plan:
        if request.kind in ("forward", "forward_backward"):
            parsed = await asyncio.to_thread(parse_forward_backward, request.body or b"")
            return plan_of_batch(self._store, self._model, run.run_id, parsed)
        return plan_of(self._store, self._directory, run, request, self._answers.now())

    def _complete(self, request: Request, plan: Plan, executed: Executed) -> None:
        answer = with_ages(executed.body, plan.versions, executed.version)
        if plan.answer is not None:
            answer = msgspec.json.encode(plan.answer)
        with self._store.transaction():
            keep(self._store, plan, executed)
            if request.kind == "unload_model":
                self._store.change("UPDATE runs SET is_unloaded=1 WHERE run_id=?", request.owner)
            self._answers.finish(
                request,
                answer,
                directory=plan.directory if plan.saved is None else "",
                outcome=checksum(executed.body),
            )

    async def _repeat(self, run_id: str, line: _Line) -> None:
        """Execute again what the learner's state lacks. Raises DataError if that is impossible."""
        position = await self._backend.position(run_id)
        lacking = self._store.all(
            Request,
            "owner=? AND seq_id>? AND seq_id<? AND error='' ORDER BY seq_id",
            run_id,
            position.seq_id,
            line.next_seq,
        )
        for request in lacking:
            if request.kind not in CHANGING:
                continue
            if request.body is None:
                raise DataError(
                    f"the learner has lost the state of {run_id}; load its newest checkpoint"
                )
            executed = await self._execute(request, request.directory)
            if checksum(executed.body) != request.outcome:
                _log.error("%s was answered in another way before", request.request_id)
        line.is_known = True

    async def _execute(self, request: Request, directory: str) -> Executed:
        return await self._backend.execute(
            Execute(
                run_id=request.owner,
                seq_id=request.seq_id,
                operation=cast(Operation, request.kind),
                body=request.body or b"",
                path=directory,
            )
        )
