"""What a request of a training run needs before the learner executes it, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import IntArray
from async_rl.protocol.service import Executed, Operation
from async_rl.service import forms, provenance
from async_rl.service.backend import Model
from async_rl.service.deviations import refuse
from async_rl.service.proto import ForwardBackward
from async_rl.service.sampling import folder_of, sequences
from async_rl.service.store import Checkpoint, Request, Run, Sampler, Store
from async_rl.sessions.errors import Refused

SAVES: Mapping[Operation, str] = {
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


def checkpoint_at(store: Store, path: str, kind: str = "") -> Checkpoint:
    """Return the checkpoint of a path. Raises Refused if there is none, or it has another kind."""
    found = store.one(Checkpoint, "path=? AND name!='' AND NOT is_gone", path)
    if found is None:
        reason = "was never saved here, was deleted or has expired"
        raise Refused(f"the checkpoint {path!r} {reason}", status=404)
    if kind not in ("", found.kind):
        raise Refused(f"{path} has {found.kind}; this needs {kind}")
    return found


def plan_of_batch(store: Store, model: Model, run_id: str, parsed: ForwardBackward) -> Plan:
    """Return the plan of a forward_backward. Raises DataError for wrong tokens."""
    refuse(parsed.loss_fn)
    drawn = provenance.check(parsed.data, model.vocab_size, sequences(store))
    return Plan(versions=[part.versions for part in drawn if part.run_id == run_id])


def plan_of(store: Store, root: Path, run: Run, request: Request, now_s: float) -> Plan:
    """Return the plan of a request in JSON. root: the service's directory. Raises DataError for a
    body or a path that cannot be used.
    """
    body, kind = request.body or b"", request.kind
    head = {"model_id": run.run_id, "type": kind}
    if request.kind in SAVES:
        return _plan_of_save(store, root, run, request, now_s)
    if kind == "load_weights":
        form = forms.read(body, forms.Load)
        found = checkpoint_at(store, form.path, "weights")
        return Plan(directory=found.directory, answer={**head, "path": form.path})
    if kind == "optim_step":
        forms.read(body, forms.OptimStep)
        return Plan()
    return Plan(answer=head)


def _plan_of_save(store: Store, root: Path, run: Run, request: Request, now_s: float) -> Plan:
    form = forms.read(request.body or b"", forms.Save)
    if form.age_encryption_recipients:
        refuse("age_encryption_recipients")
    kind = SAVES[cast(Operation, request.kind)]
    number = form.sampling_session_seq_id
    name = form.path or ""
    if not name and (number is None or request.kind != "save_weights_for_sampler"):
        name = f"{request.seq_id:06d}"
    path = f"tinker://{run.run_id}/{kind}/{name}"
    folder = root / "runs" / folder_of(run.run_id) / kind
    directory = folder / (name or f"~{number}")
    if name and not form.overwrite and store.one(Checkpoint, "path=? AND NOT is_gone", path):
        raise DataError(f"{path} exists; choose another name, or overwrite it")
    # A load of the old one may be repeated, so its directory stays.
    if store.one(Checkpoint, "directory=?", str(directory)):
        directory = folder / f"{name}~{request.seq_id}"
    saved = Checkpoint(
        directory=str(directory),
        path=path,
        run_id=run.run_id,
        kind=kind,
        name=name,
        version=0,
        created_s=now_s,
        size_bytes=0,
        user_metadata=forms.words(form.user_metadata),
        expires_s=now_s + form.ttl_seconds if form.ttl_seconds else None,
    )
    answer = {"path": path, "type": request.kind}
    if name:
        return Plan(directory=saved.directory, answer=answer, saved=saved)
    sampler = Sampler(
        sampler_id=f"{run.session_id}:sample:{number}",
        session_id=run.session_id,
        run_id=run.run_id,
        adapter=saved.directory,
        is_inflight=form.kind == "inflight",
    )
    if store.one(Sampler, "sampler_id=?", sampler.sampler_id):
        raise DataError(f"the sampling session {sampler.sampler_id} exists")
    answer = {"sampling_session_id": sampler.sampler_id, "type": request.kind}
    return Plan(directory=saved.directory, answer=answer, saved=saved, sampler=sampler)


def keep(store: Store, plan: Plan, executed: Executed) -> None:
    """Store what an executed request has made."""
    if plan.saved is not None:
        store.change("UPDATE checkpoints SET is_gone=1 WHERE path=? AND name!=''", plan.saved.path)
        files = Path(plan.directory).rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
        store.add(msgspec.structs.replace(plan.saved, version=executed.version, size_bytes=size))
    if plan.sampler is not None:
        if plan.sampler.is_inflight:
            # Its samplers have the newer weights now.
            store.change(
                "UPDATE checkpoints SET is_gone=1 WHERE directory IN (SELECT adapter FROM samplers"
                " WHERE run_id=? AND is_inflight)",
                plan.sampler.run_id,
            )
        store.add(msgspec.structs.replace(plan.sampler, version=executed.version))
