"""The order in which the learner executes the requests of training runs: one at a time, and among
runs the one with the least work is next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError, Unavailable
from async_rl.core.frozen import frozen
from async_rl.core.types import IntArray
from async_rl.protocol.service import Executed, LoadSlot
from async_rl.service import forms
from async_rl.service.lines import Line
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
_NUM_STEPS = """
SELECT count(*) FROM requests WHERE kind='optim_step' AND answered_s IS NOT NULL AND error=''
"""


@frozen
class Plan:
    """directory: from where the learner loads, or to where it saves, or the custom loss that it
    computes.  answer: if the learner's own
    is not the client's.  saved, sampler: the rows of what is made.  versions: int32 arrays, of the
    trained tokens that weights of this run have drawn.
    """

    directory: str = ""
    answer: dict[str, Any] | None = None
    saved: Checkpoint | None = None
    sampler: Sampler | None = None
    versions: Sequence[IntArray] = ()


class Order:
    """Executes the requests of training runs."""

    def __init__(self, store: Store, backend: Processes, *, is_alone: bool = False) -> None:
        """is_alone: the learner can have one run at a time."""
        self._store = store
        self._backend = backend
        self._is_alone = is_alone
        self._lines: dict[str, Line] = {}
        self._leaving: set[str] = set()
        self._least_work = 0
        """At the start of the newest request, or of all requests once none waits: a run that paused
        has no right to the work that it did not ask for.
        """
        self._has_work = asyncio.Event()
        self._num_steps: int = store.value(_NUM_STEPS, [])

    def _line(self, run_id: str) -> Line:
        if run_id not in self._lines:
            self._lines[run_id] = Line(run_id, self._store, self._backend)
        return self._lines[run_id]

    def wake(self) -> None:
        """Notice a further request in the store."""
        self._has_work.set()

    def release(self, run_id: str) -> None:
        """Free the memory of a run, until its next request."""
        self._leaving.add(run_id)
        self._has_work.set()

    async def run(self) -> None:
        """Takes: requests of runs; waits for: one that is next in its run; woken by: wake."""
        while True:
            ready = self._store.ready()
            leaving = self._leaving.difference(ready)
            try:
                if leaving:
                    run_id = leaving.pop()
                    await self._line(run_id).leave()
                    self._leaving.remove(run_id)
                elif ready:
                    await self._advance([self._line(run_id) for run_id in ready])
                else:
                    works = [line.work for line in self._lines.values()]
                    self._least_work = max(works, default=0)
                    self._has_work.clear()
                    await self._has_work.wait()
            except Unavailable as error:
                _log.warning("the learner left (%s); its requests are executed again", error)
                for line in self._lines.values():
                    line.is_known = False

    async def _advance(self, ready: Sequence[Line]) -> None:
        """Execute the next request of the run with the least work."""
        for other in ready:
            other.work = max(other.work, self._least_work)
        line = min(ready, key=lambda line: line.work)
        self._least_work = line.work
        waiting = "owner=? AND answered_s IS NULL AND kind!='sample' ORDER BY seq_id"
        request = self._store.one(Request, waiting, line.run_id)
        assert request is not None
        for other in self._lines.values():
            if self._is_alone and other is not line:
                await other.leave()
        try:
            plan = await self._plan(request)
            executed = await line.execute(request, plan.directory, self._num_steps + 1)
            if plan.sampler is not None and plan.sampler.is_inflight:
                await self._backend.load(
                    LoadSlot(
                        policy=line.folder.name,
                        adapter=plan.directory,
                        version=executed.version,
                    )
                )
        except (DataError, Refused) as error:
            self._store.finish(request, error=str(error))
        else:
            self._complete(request, plan, executed)
        await line.answered(request)

    async def _plan(self, request: Request) -> Plan:
        """Return the plan of a request. Raises DataError, Refused for a batch or a path that cannot
        be used.
        """
        body = request.body or b""
        kind = request.kind
        if kind in SAVES:
            return self._plan_of_save(request, forms.read(body, forms.Save))
        if kind in ("forward", "forward_backward"):
            parsed = await asyncio.to_thread(parse_forward_backward, body)
            forms.refuse(parsed.loss_fn)
            return Plan(
                directory=str(parsed.config.get("loss_id", "")),
                versions=check(parsed.data, request.owner, self._store),
            )
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
            forms.refuse("age_encryption_recipients")
        store = self._store
        now_s = self._store.now()
        run_id = request.owner
        kind = SAVES[request.kind]
        number = form.sampling_session_seq_id
        name = form.path or ""
        if not name and (number is None or kind != "sampler_weights"):
            name = f"{request.seq_id:06d}"
        path = f"tinker://{run_id}/{kind}/{name}"
        # A load of an older one of this name may be repeated, so its directory stays.
        directory = str(self._line(run_id).folder / kind / f"{name}~{request.seq_id}")
        if name and not form.overwrite and store.one(Checkpoint, "path=? AND NOT is_gone", path):
            raise DataError(f"{path} exists; choose another name, or overwrite it")
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
        sampler = None
        if not name:
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
        store = self._store
        sampler = plan.sampler
        run_id = request.owner
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
        self._num_steps += request.kind == "optim_step"
