"""The front of the service: it accepts requests, lets the learner and the generators compute, and
deletes what nobody needs any more (docs/service.md).

Invariant: a request is in the store before the client gets its id, and its answer before the client
can read it; so a killed front continues where it was.
"""

import asyncio
import collections
import logging
import shutil
from typing import Any

from async_rl.core.errors import DataError
from async_rl.service import forms
from async_rl.service.forms import Call
from async_rl.service.order import Order
from async_rl.service.processes import Processes
from async_rl.service.sampling import Model, encoded, sample_of
from async_rl.service.store import Checkpoint, Request, Run, Sampler, Session, Store
from async_rl.sessions.errors import Refused

_log = logging.getLogger(__name__)
_FURTHEST = 10_000
"""Requests of a run that wait; a number further away is not one that its client sends."""
MOST_SAMPLES = 10_000
"""Samples of a session without an answer; its client waits with further ones."""
MOST_RUNS = 64
"""Training runs of a session that are not unloaded."""
_SWEEP_S = 60.0
_SILENT_S = 300.0
"""Clients send a heartbeat every 10 s. After this time their runs leave the learner's memory; the
next request brings a run back.
"""
_DAY_S = 86_400.0
"""An answer waits this long for its client, a sequence for being trained, a session for a sign."""
_DELIVERED_S = 600.0
"""A delivered answer stays for clients that lost it on the way."""

_NUM_RUNS = "SELECT count(*) FROM runs WHERE NOT is_unloaded AND run_id!=? AND session_id=?"


class Desk:
    """Accepts requests, and executes them in `run`."""

    def __init__(self, store: Store, backend: Processes, model: Model) -> None:
        self.store = store
        self.model = model
        # While no front was there, no client could give a sign.
        store.change("UPDATE sessions SET seen_s=?", store.now())
        self._order = Order(store, backend, is_alone=not model.most_rank)
        self._backend = backend
        self._drawing = collections.defaultdict[str, dict[str, asyncio.Task[None]]](dict)
        """The samples of each session without an answer. A table of all of them would be counted
        anew for each further one: 7 ms at 10,000.
        """
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Execute requests until the task is cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for request in self.store.all(Request, "answered_s IS NULL AND kind='sample'"):
                self._start(request, self.store.known(Sampler, request.owner))
            self._tasks.create_task(self._order.run(), name="training runs")
            self._tasks.create_task(self._sweeps(), name="sweeps")

    def session(self, session_id: str) -> None:
        """Notice a sign of a client. Raises Refused unless its session is open."""
        ended = self.store.known(Session, session_id).ended
        if ended:
            raise Refused(f"the session {session_id} is finished ({ended})", status=410)
        seen = "UPDATE sessions SET seen_s=? WHERE session_id=?"
        self.store.change(seen, self.store.now(), session_id)

    def submit(
        self, run_id: str, seq_id: int, kind: str, body: bytes, *, new: Run | None = None
    ) -> dict[str, Any]:
        """Accept a request of a training run, which may be new. Raises Refused, also for a number
        that another request has.
        """
        run = new or self.store.known(Run, run_id)
        self.session(run.session_id)
        if new is not None and self.store.value(_NUM_RUNS, [run_id, run.session_id]) >= MOST_RUNS:
            raise Refused(f"{run.session_id} has {MOST_RUNS} training runs; unload one of them")
        if run.is_unloaded and kind != "unload_model":
            raise Refused(f"{run_id} is unloaded", status=404)
        if not (0 if new else 1) <= seq_id <= self.store.next_seq(run_id) + _FURTHEST:
            raise Refused(f"seq_id={seq_id} is not the number of a request of {run_id}")
        request, is_known = self.store.put(run_id, seq_id, kind, body, new=new)
        if not is_known:
            self._order.wake()
        return {"request_id": request.request_id, "model_id": run_id}

    def sample(self, call: Call) -> dict[str, Any]:
        """Accept a request for samples. Raises Refused, DataError."""
        form = call.read(forms.AskSample)
        sampler = self.store.known(Sampler, form.sampling_session_id)
        self.session(sampler.session_id)
        sample_of(form, sampler, self.model)
        if len(self._drawing[sampler.session_id]) >= MOST_SAMPLES:
            raise Refused(f"{MOST_SAMPLES} samples wait; try again later", status=429)
        request, is_known = self.store.put(sampler.sampler_id, form.seq_id, "sample", call.body)
        if not is_known:
            self._start(request, sampler)
        ids = [f"{request.request_id}.{index}" for index in range(form.num_samples)]
        return {"request_id": request.request_id, "sample_sequence_ids": ids}

    def cancel(self, call: Call) -> None:
        """Stop a request for samples. Raises Refused, DataError."""
        request_id = call.read(forms.Named).request_id
        request = self.store.known(Request, request_id)
        if request.answered_s is None and request.kind == "sample":
            sampler = self.store.known(Sampler, request.owner)
            drawing = self._drawing[sampler.session_id].pop(request_id, None)
            if drawing is not None:
                drawing.cancel()
            self.store.finish(request, error="cancelled by the client")

    def _start(self, request: Request, sampler: Sampler) -> None:
        # A request that comes before `run` has tasks is found by it in the store.
        if self._tasks is not None:
            drawing = self._tasks.create_task(self._draw(request, sampler), name=request.request_id)
            self._drawing[sampler.session_id][request.request_id] = drawing

    async def _draw(self, request: Request, sampler: Sampler) -> None:
        # Samplers in flight have the newest weights that any of them was made with.
        if sampler.is_inflight:
            newest = "is_inflight AND run_id=? ORDER BY rowid DESC"
            sampler = self.store.one(Sampler, newest, sampler.run_id) or sampler
        try:
            form = forms.read(request.body or b"", forms.AskSample)
            sample = sample_of(form, sampler, self.model, request_id=request.request_id)
            answer = encoded(await self._backend.sample(sample), form)
        except DataError as error:
            self.store.finish(request, error=str(error))
        else:
            self.store.finish(request, answer)
        del self._drawing[sampler.session_id][request.request_id]

    async def _sweeps(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """Delete what nobody needs any more, and free the memory of silent clients' runs."""
        now = self.store.now()
        change = self.store.change
        change(
            "UPDATE sessions SET ended='no heartbeat for a day' WHERE ended='' AND seen_s<?",
            now - _DAY_S,
        )
        silent = "session_id IN (SELECT session_id FROM sessions WHERE seen_s<?)"
        for run in self.store.all(Run, f"NOT is_unloaded AND {silent}", now - _SILENT_S):
            self._order.release(run.run_id)
        change(
            "UPDATE requests SET answer=NULL WHERE answer IS NOT NULL AND kind!='sample' AND"
            " (answered_s<? OR delivered_s<?)",
            now - _DAY_S,
            now - _DELIVERED_S,
        )
        change("DELETE FROM requests WHERE kind='sample' AND answered_s<?", now - _DAY_S)
        ended = "session_id IN (SELECT session_id FROM sessions WHERE ended!='')"
        waiting = "sampler_id IN (SELECT owner FROM requests WHERE answered_s IS NULL)"
        change(f"DELETE FROM samplers WHERE {ended} AND NOT {waiting}")
        change(
            "UPDATE checkpoints SET is_gone=1 WHERE expires_s<? OR name='' AND run_id IN (SELECT"
            f" run_id FROM runs WHERE {ended})",
            now,
        )
        # A load that may be repeated, and a sampler of a fixed state, need its files.
        unused = (
            "is_gone AND directory NOT IN (SELECT directory FROM requests WHERE directory!='' AND"
            " body IS NOT NULL)"
            " AND directory NOT IN (SELECT adapter FROM samplers WHERE NOT is_inflight)"
        )
        for checkpoint in self.store.all(Checkpoint, unused):
            await asyncio.to_thread(shutil.rmtree, checkpoint.directory, ignore_errors=True)
            change("DELETE FROM checkpoints WHERE directory=?", checkpoint.directory)
