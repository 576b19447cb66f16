"""The order in which the learner executes the requests of training runs.

Invariants
- The requests of a run are executed in the order of their numbers, one at a time. Among runs the
  one with the least work is next.
- A learner that has lost requests of a run gets those that changed the run again, in order.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError, Unavailable
from async_rl.core.frozen import frozen
from async_rl.core.types import IntArray
from async_rl.protocol.service import CHANGING, Execute, Executed, Operation
from async_rl.service import forms
from async_rl.service.address import folder_of
from async_rl.service.deviations import refuse
from async_rl.service.processes import Processes
from async_rl.service.proto import parse_forward_backward
from async_rl.service.sampling import check, with_ages
from async_rl.service.store import Checkpoint, Request, Run, Sampler, Store
from async_rl.sessions.errors import Refused

_log = logging.getLogger(__name__)
SAVES: Mapping[str, str] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""The kind of checkpoint that an operation makes, as paths have it."""


@frozen
class Plan:
    """directory: from where the learner loads, or to where it saves.  answer: if the learner's own
    is not the client's.  saved, sampler: the rows of what is made.  versions: int32 arrays, of the
    trained tokens that weights of this run have drawn.
    """

    directory: str = ""
    answer: dict[str, Any] | None = None
    saved: Checkpoint | None = None
    sampler: Sampler | None = None
    versions: Sequence[IntArray] = ()


class _Line:
    """The requests of a run. next_seq: of the next one to execute; work: tokens so far.

    is_known: the learner has executed all before next_seq; is_held: its memory may have the run.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self.waiting: set[int] = set()
        self.work = 0
        self.is_known = False
        self.is_held = True

    @property
    def is_ready(self) -> bool:
        """Return whether the next request is there."""
        return self.next_seq in self.waiting


class Order:
    """Executes the requests of training runs."""

    def __init__(self, store: Store, backend: Processes) -> None:
        self._store = store
        self._backend = backend
        self._lines = collections.defaultdict[str, _Line](_Line)
        self._leaving: set[str] = set()
        self._has_work = asyncio.Event()
        for run in store.all(Run, "TRUE"):
            query = "SELECT 1 + max(seq_id) FROM requests WHERE owner=? AND answered_s IS NOT NULL"
            self._lines[run.run_id].next_seq = store.value(query, [run.run_id]) or 0
        for request in self._store.all(Request, "answered_s IS NULL AND kind!='sample'"):
            self._lines[request.owner].waiting.add(request.seq_id)

    def next_seq(self, run_id: str) -> int:
        """Return the number of the next request of a run to execute."""
        return self._lines[run_id].next_seq

    def put(self, run_id: str, seq_id: int) -> None:
        """Add a request, which is in the store."""
        line = self._lines[run_id]
        if not line.is_ready:
            # A run that paused has no right to the work that it did not ask for.
            ready = [other.work for other in self._lines.values() if other.is_ready]
            line.work = max(line.work, min(ready, default=0))
        line.waiting.add(seq_id)
        self._has_work.set()

    def release(self, run_id: str) -> None:
        """Free the learner's memory of a run, until its next request."""
        if self._lines[run_id].is_held:
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
        request = self._store.one(Request, "owner=? AND seq_id=?", run_id, line.next_seq)
        assert request is not None
        try:
            if not line.is_known:
                await self._repeat(run_id, line)
            plan = await self._plan(request)
            executed = await self._execute(request, plan.directory)
            line.work += executed.tokens
            if executed.error:
                raise DataError(executed.error)
            if plan.sampler is not None and plan.sampler.is_inflight:
                directory = Path(plan.directory)
                await self._backend.load(folder_of(run_id), directory, executed.version)
        except (DataError, Refused) as error:
            self._store.finish(request, error=str(error))
        else:
            self._complete(request, plan, executed)
        line.waiting.remove(request.seq_id)
        line.next_seq += 1

    async def _plan(self, request: Request) -> Plan:
        """Return the plan of a request. Raises DataError, Refused for a batch or a path that cannot
        be used.
        """
        body, kind = request.body or b"", request.kind
        if kind in SAVES:
            return self._plan_of_save(request, forms.read(body, forms.Save))
        if kind in ("forward", "forward_backward"):
            parsed = await asyncio.to_thread(parse_forward_backward, body)
            refuse(parsed.loss_fn)
            drawn = check(parsed.data, self._store)
            return Plan(versions=[it.versions for it in drawn if it.run_id == request.owner])
        if kind == "optim_step":
            return Plan()
        answer = {"model_id": request.owner}
        if kind != "load_weights":
            return Plan(answer=answer)
        path = forms.read(body, forms.Load).path
        found = self._store.checkpoint(path, "weights")
        return Plan(directory=found.directory, answer={**answer, "path": path})

    def _plan_of_save(self, request: Request, form: forms.Save) -> Plan:
        if form.age_encryption_recipients:
            refuse("age_encryption_recipients")
        store, now_s, run_id = self._store, self._store.now(), request.owner
        kind = SAVES[request.kind]
        number = form.sampling_session_seq_id
        name = form.path or ""
        if not name and (number is None or kind != "sampler_weights"):
            name = f"{request.seq_id:06d}"
        path = f"tinker://{run_id}/{kind}/{name}"
        folder = store.directory / "runs" / folder_of(run_id) / kind
        directory = str(folder / (name or f"~{number}"))
        if name and not form.overwrite and store.one(Checkpoint, "path=? AND NOT is_gone", path):
            raise DataError(f"{path} exists; choose another name, or overwrite it")
        # A load of the old one may be repeated, so its directory stays.
        if store.one(Checkpoint, "directory=?", directory):
            directory = str(folder / f"{name}~{request.seq_id}")
        saved = Checkpoint(
            directory=directory,
            path=path,
            run_id=run_id,
            kind=kind,
            name=name,
            created_s=now_s,
            user_metadata=forms.words(form.user_metadata),
            expires_s=now_s + form.ttl_seconds if form.ttl_seconds else None,
        )
        answer = {"path": path}
        if name:
            return Plan(directory=directory, answer=answer, saved=saved)
        session_id = store.known(Run, run_id).session_id
        sampler = Sampler(
            sampler_id=f"{session_id}:sample:{number}",
            session_id=session_id,
            run_id=run_id,
            adapter=directory,
            is_inflight=form.kind == "inflight",
        )
        if store.one(Sampler, "sampler_id=?", sampler.sampler_id):
            raise DataError(f"the sampling session {sampler.sampler_id} exists")
        answer = {"sampling_session_id": sampler.sampler_id}
        return Plan(directory=directory, answer=answer, saved=saved, sampler=sampler)

    def _complete(self, request: Request, plan: Plan, executed: Executed) -> None:
        """Store the answer, and what the request has made."""
        store, sampler, run_id = self._store, plan.sampler, request.owner
        answer = with_ages(executed.body, plan.versions, executed.version)
        if plan.answer is not None:
            answer = msgspec.json.encode({"type": request.kind, **plan.answer})
        with store.transaction():
            if plan.saved is not None:
                # Samplers in flight have the newer weights now.
                store.change(
                    "UPDATE checkpoints SET is_gone=1 WHERE path=? AND name!='' OR ? AND directory"
                    " IN (SELECT adapter FROM samplers WHERE run_id=? AND is_inflight)",
                    plan.saved.path,
                    sampler is not None and sampler.is_inflight,
                    run_id,
                )
                files = Path(plan.directory).rglob("*")
                size = sum(file.stat().st_size for file in files if file.is_file())
                made = {"version": executed.version, "size_bytes": size}
                store.add(msgspec.structs.replace(plan.saved, **made))
            if sampler is not None:
                store.add(msgspec.structs.replace(sampler, version=executed.version))
            if request.kind == "unload_model":
                store.change("UPDATE runs SET is_unloaded=1 WHERE run_id=?", run_id)
            store.finish(
                request,
                answer,
                directory="" if plan.saved else plan.directory,
                outcome=checksum(executed.body),
            )
            store.change(
                "UPDATE requests SET body=NULL WHERE owner=? AND seq_id<=? AND body IS NOT NULL",
                run_id,
                executed.saved_seq_id,
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
