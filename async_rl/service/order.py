"""The order in which the learner executes the requests of training runs: one at a time, and among
runs the one with the least work is next.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from async_rl.core.checksums import checksum
from async_rl.core.errors import DataError, Unavailable
from async_rl.core.types import IntArray
from async_rl.protocol.service import LoadSlot
from async_rl.service import forms
from async_rl.service.processes import Line, Processes
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
        first = "owner=? AND answered_s IS NULL AND kind!='sample' ORDER BY seq_id LIMIT 1"
        (request,) = self._store.all(Request, first, line.run_id)
        for other in self._lines.values():
            if self._is_alone and other is not line:
                await other.leave()
        try:
            await self._perform(request, line)
        except (DataError, Refused) as error:
            self._store.finish(request, error=str(error))
        await line.answered(request)

    async def _perform(self, request: Request, line: Line) -> None:
        """Execute a request and store its answer. Raises DataError, Refused for a batch or a path
        that cannot be used.
        """
        body = request.body or b""
        kind = request.kind
        if kind in SAVES:
            await self._save(request, line, forms.read(body, forms.Save))
            return
        store = self._store
        used = ""
        versions: list[IntArray] = []
        answer = {"type": kind, "model_id": request.owner}
        if kind in ("forward", "forward_backward"):
            parsed = await asyncio.to_thread(parse_forward_backward, body)
            forms.refuse(parsed.loss_fn)
            versions = check(parsed.data, request.owner, store)
        if kind == "load_weights":
            answer["path"] = forms.read(body, forms.Load).path
            used = store.checkpoint(answer["path"], "weights").directory
        executed = await line.execute(request, used, self._num_steps + 1)
        content = msgspec.json.encode(answer)
        # The answer to a request that the learner computes comes from the learner.
        if executed.body:
            content = with_ages(executed.body, versions, executed.version)
        with store.transaction():
            if kind == "unload_model":
                store.change("UPDATE runs SET is_unloaded=1 WHERE run_id=?", request.owner)
            store.finish(request, content, directory=used, outcome=checksum(executed.body))
        self._num_steps += kind == "optim_step"

    async def _save(self, request: Request, line: Line, form: forms.Save) -> None:
        """Save, and store what is made: a checkpoint, and perhaps its sampler."""
        if form.age_encryption_recipients:
            forms.refuse("age_encryption_recipients")
        store = self._store
        run_id = request.owner
        kind = SAVES[request.kind]
        number = form.sampling_session_seq_id
        name = form.path or ""
        if not name and (number is None or kind != "sampler_weights"):
            name = f"{request.seq_id:06d}"
        path = f"tinker://{run_id}/{kind}/{name}"
        if name and not form.overwrite and store.one(Checkpoint, "path=? AND NOT is_gone", path):
            raise DataError(f"{path} exists; choose another name, or overwrite it")
        session_id = store.known(Run, run_id).session_id
        sampler_id = f"{session_id}:sample:{number}"
        if not name and store.one(Sampler, "sampler_id=?", sampler_id):
            raise DataError(f"the sampling session {sampler_id} exists")
        # A load of an older one of this name may be repeated, so its directory stays.
        directory = line.folder / kind / f"{name}~{request.seq_id}"
        executed = await line.execute(request, str(directory), self._num_steps + 1)
        version = executed.version
        is_inflight = not name and form.kind == "inflight"
        if is_inflight:
            await self._backend.load(
                LoadSlot(policy=line.folder.name, adapter=str(directory), version=version)
            )
        now_s = store.now()
        saved = Checkpoint(
            directory=str(directory),
            path=path,
            run_id=run_id,
            kind=kind,
            name=name,
            created_s=now_s,
            user_metadata=forms.words(form.user_metadata),
            version=version,
            size_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
            expires_s=now_s + form.ttl_seconds if form.ttl_seconds else None,
        )
        sampler = Sampler(
            sampler_id=sampler_id,
            session_id=session_id,
            run_id=run_id,
            adapter=saved.directory,
            is_inflight=is_inflight,
            version=version,
        )
        answer = {"type": request.kind}
        with store.transaction():
            # Samplers in flight have the newer weights now.
            store.change(
                "UPDATE checkpoints SET is_gone=1 WHERE path=? AND name!='' OR ? AND directory IN"
                " (SELECT adapter FROM samplers WHERE run_id=? AND is_inflight)",
                path,
                is_inflight,
                run_id,
            )
            store.add(saved)
            if name:
                answer["path"] = path
            else:
                answer["sampling_session_id"] = sampler_id
                store.add(sampler)
            store.finish(request, msgspec.json.encode(answer))
