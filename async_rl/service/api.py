"""The handlers of the Tinker API's requests, and the queries of its sessions and checkpoints.

In a query :run_id and its like are parts of the path or fields of the body; :limit and :offset are
of the URL; :name and :tokenizer are of the base model.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.service import forms
from async_rl.service.desk import Desk
from async_rl.service.forms import Call
from async_rl.service.proto import decode
from async_rl.service.sampling import sequences
from async_rl.service.store import Checkpoint, Run, Sampler, Session
from async_rl.sessions.errors import Refused

_TIME = "strftime('%Y-%m-%dT%H:%M:%fZ', {}, 'unixepoch')"
_CHECKPOINT = f"""json_object(
    'checkpoint_id', kind || '/' || name, 'tinker_path', path, 'size_bytes', size_bytes,
    'checkpoint_type', CASE kind WHEN 'weights' THEN 'training' WHEN 'sampler_weights' THEN
        'sampler' ELSE 'external' END,
    'time', {_TIME.format("created_s")}, 'expires_at', {_TIME.format("expires_s")},
    'user_metadata', json(user_metadata))"""
_LISTED = "FROM checkpoints WHERE NOT is_gone AND name!=''"
_NEWEST = (
    f"(SELECT json({_CHECKPOINT}) {_LISTED} AND checkpoints.run_id=runs.run_id AND kind='{{}}'"
    " ORDER BY rowid DESC LIMIT 1)"
)
_REQUESTED = "(SELECT max(accepted_s) FROM requests WHERE owner=run_id)"
_RANK = "json_extract(lora, '$.rank')"
_IS_LORA = f"json(iif({_RANK}, 'true', 'false'))"
_RUN = f"""json_object(
    'training_run_id', run_id, 'base_model', :name, 'model_owner', 'local',
    'is_lora', {_IS_LORA}, 'lora_rank', {_RANK}, 'last_request_time', {_TIME.format(_REQUESTED)},
    'last_checkpoint', {_NEWEST.format("weights")},
    'last_sampler_checkpoint', {_NEWEST.format("sampler_weights")},
    'user_metadata', json(user_metadata))"""


def _page(name: str, row: str, source: str) -> str:
    """Return the query of a list that clients read in parts."""
    cursor = f"'limit', :limit, 'offset', :offset, 'total_count', (SELECT count(*) {source})"
    rows = f"SELECT {row} AS shown {source} ORDER BY rowid DESC LIMIT :limit OFFSET :offset"
    return (
        f"SELECT json_object('{name}', json_group_array(json(shown)), 'cursor',"
        f" json_object({cursor})) FROM ({rows})"
    )


QUERIES: Mapping[str, str] = {
    "GET sessions": _page("sessions", "json_quote(session_id)", "FROM sessions"),
    "GET sessions/{session_id}": "SELECT json_object('display_name', display_name, 'user_metadata',"
    " json(user_metadata), 'training_run_ids', (SELECT json_group_array(run_id) FROM runs WHERE"
    " session_id=:session_id), 'sampler_ids', (SELECT json_group_array(sampler_id) FROM samplers"
    " WHERE session_id=:session_id)) FROM sessions WHERE session_id=:session_id",
    "GET training_runs": _page("training_runs", _RUN, "FROM runs"),
    "GET training_runs/{run_id}": f"SELECT {_RUN} FROM runs WHERE run_id=:run_id",
    "GET training_runs/{run_id}/checkpoints": "SELECT json_object('checkpoints',"
    f" (SELECT json_group_array(json(shown)) FROM (SELECT {_CHECKPOINT} AS shown {_LISTED} AND"
    " run_id=:run_id ORDER BY rowid DESC))) FROM runs WHERE run_id=:run_id",
    "GET checkpoints": _page("checkpoints", _CHECKPOINT, _LISTED),
    "GET samplers/{sampler_id}": "SELECT json_object('sampler_id', sampler_id, 'base_model', :name,"
    " 'model_path', model_path) FROM samplers WHERE sampler_id=:sampler_id",
    "POST get_info": f"SELECT json_object('type', 'get_info', 'model_id', run_id, 'is_lora',"
    f" {_IS_LORA}, 'lora_rank', {_RANK}, 'model_data', json_object('model_name', :name,"
    " 'tokenizer_id', :tokenizer)) FROM runs WHERE run_id=:model_id",
    "POST weights_info": "SELECT json_patch(lora, json_object('base_model', :name, 'is_lora',"
    f" {_IS_LORA}, 'lora_rank', {_RANK})) FROM runs WHERE run_id IN (SELECT run_id FROM checkpoints"
    " WHERE path=:tinker_path AND NOT is_gone AND name!='')",
}
"""By the request."""


Json = dict[str, Any]
_PATH = "tinker://{run_id}/{kind}/{name}"


class Api:
    """The handlers of the routes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._store = desk.store

    def create_session(self, call: Call) -> Json:
        """Open a session; what this server does in another way is its warning."""
        form = call.read(forms.NewSession)
        session = Session(
            session_id=self._store.new_id()[:16],
            seen_s=self._store.now(),
            display_name=form.display_name,
            user_metadata=forms.words(form.user_metadata),
        )
        self._store.add(session)
        return {
            "type": "create_session",
            "session_id": session.session_id,
            "warning_message": forms.WARNING,
        }

    def heartbeat(self, call: Call) -> Json:
        """Keep a session alive."""
        self._desk.session(call.read(forms.Named).session_id)
        return {"type": "session_heartbeat"}

    def finish(self, call: Call) -> None:
        """End a session. The first reason stays."""
        session = self._store.known(Session, call.path["session_id"])
        statement = "UPDATE sessions SET ended=?, seen_s=0 WHERE session_id=? AND ended=''"
        reason = call.read(forms.Finish).reason.type
        self._store.change(statement, reason, session.session_id)

    def create_model(self, call: Call) -> Json:
        """Accept a new training run. Raises DataError, Refused for what cannot be trained."""
        form = call.read(forms.CreateModel)
        lora = form.lora_config or forms.LoraConfig(rank=0)
        most = self._desk.model.most_rank
        if lora.rank > most or (not lora.rank and most):
            raise DataError(
                f"rank={lora.rank} is not trained here: model.lora.rank={most} of this server; rank"
                " 0 is all weights and needs a server with model.lora=none"
            )
        text = msgspec.json.encode(lora).decode()
        return self._create("create_model", form, text, call)

    def load_weights(self, call: Call) -> Json:
        """Accept a load, into a run or as a new one."""
        form = call.read(forms.Load)
        if form.session_id is None or form.model_seq_id is None:
            return self.numbered("load_weights", call)
        saved = self._store.checkpoint(form.path, "weights")
        lora = self._store.known(Run, saved.run_id).lora
        return self._create("load_weights", form, lora, call)

    def _create(
        self, kind: str, form: forms.CreateModel | forms.Load, lora: str, call: Call
    ) -> Json:
        self._check_base(form.base_model)
        if form.optimizer_config is not None:
            forms.refuse(form.optimizer_config.type)
        run = Run(
            run_id=f"{form.session_id}:train:{form.model_seq_id}",
            session_id=str(form.session_id),
            lora=lora,
            user_metadata=forms.words(form.user_metadata),
        )
        return self._desk.submit(run.run_id, 0, kind, call.body, new=run)

    def _check_base(self, name: str | None) -> None:
        # A program names a model of the hub, the service perhaps the directory with its copy.
        served = self._desk.model.name
        if name is not None and PurePath(name).name != PurePath(served).name:
            raise Refused(f"base_model={name!r} is not served; use {served!r}")

    def forward_backward(self, call: Call) -> Json:
        """Accept a batch."""
        request = decode(call.body)
        kind = "forward" if request.forward_only else "forward_backward"
        # Equal requests have one form of the body.
        same = bytes(request.SerializeToString(deterministic=True))
        return self._desk.submit(request.model_id, request.seq_id, kind, same)

    def numbered(self, kind: str, call: Call) -> Json:
        """Accept a request of a training run in JSON."""
        form = call.read(forms.Numbered)
        return self._desk.submit(form.model_id, form.seq_id, kind, call.body)

    def unload(self, call: Call) -> Json:
        """Accept the end of a training run."""
        run_id = call.read(forms.Named).model_id
        # It comes without a number.
        query = (
            "SELECT coalesce(max(seq_id) FILTER (WHERE kind='unload_model'), 1 + max(seq_id)) FROM"
            " requests WHERE owner=?"
        )
        seq_id = self._store.value(query, [run_id]) or 0
        return self._desk.submit(run_id, seq_id, "unload_model", call.body)

    def create_sampler(self, call: Call) -> Json:
        """Open a sampling session of the base model or of a checkpoint."""
        form = call.read(forms.NewSampler)
        self._desk.session(form.session_id)
        self._check_base(form.base_model)
        made: Json = {}
        if form.model_path is not None:
            saved = self._store.checkpoint(form.model_path, "sampler_weights")
            made = {"run_id": saved.run_id, "adapter": saved.directory, "version": saved.version}
        sampler = Sampler(
            sampler_id=f"{form.session_id}:sample:{form.sampling_session_seq_id}",
            session_id=form.session_id,
            model_path=form.model_path,
            **made,
        )
        known = self._store.one(Sampler, "sampler_id=?", sampler.sampler_id)
        if known is None:
            self._store.add(sampler)
        elif known != sampler:
            raise Refused(f"{sampler.sampler_id} is another sampling session", status=409)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    def sequence(self, call: Call) -> Json:
        """Return a sampled sequence with the version of each token."""
        drawn = sequences(self._store)(call.path["sequence_id"])
        arrays = ("tokens", "logprobs", "versions")
        return {
            "model_id": drawn.run_id,
            **{name: getattr(drawn, name).tolist() for name in arrays},
        }

    def shown(self, query: str, call: Call) -> msgspec.Raw:
        """Return the content of a query's answer."""
        page = msgspec.convert(call.query, forms.Page, strict=False)
        # GET has no body.
        named = msgspec.structs.asdict(forms.read(call.body or b"{}", forms.Named))
        names = {**named, **call.path}
        model = dataclasses.asdict(self._desk.model)
        text = self._store.value(query, {**names, **model, **msgspec.structs.asdict(page)})
        if text is None:
            given = ", ".join(filter(None, names.values()))
            raise Refused(f"{given!r} is not known here", status=404)
        return msgspec.Raw(text.encode())

    def urls(self, call: Call) -> Json:
        """Return where the files of exported weights are: on the disk that client and service
        share.
        """
        root = Path(self._saved(call, "external_weights").directory)
        files = [file for file in root.rglob("*") if file.is_file()]
        urls = {str(file.relative_to(root)): file.as_uri() for file in files}
        return {"urls": urls, "expires": "9999-01-01T00:00:00Z"}

    def delete(self, call: Call) -> None:
        """Delete a checkpoint."""
        statement = "UPDATE checkpoints SET is_gone=1 WHERE directory=?"
        self._store.change(statement, self._saved(call).directory)

    def set_ttl(self, call: Call) -> None:
        """Let a checkpoint expire, or not."""
        # No time and any number are NULL.
        statement = "UPDATE checkpoints SET expires_s=?+? WHERE directory=?"
        seconds = call.read(forms.Ttl).ttl_seconds
        self._store.change(statement, self._store.now(), seconds, self._saved(call).directory)

    def _saved(self, call: Call, kind: str = "") -> Checkpoint:
        return self._store.checkpoint(_PATH.format_map(call.path), kind)
