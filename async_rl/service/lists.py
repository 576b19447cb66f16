"""The requests of the Tinker API that show what there is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.frozen import Value
from async_rl.service import forms
from async_rl.service.api import Call, Json
from async_rl.service.backend import Model
from async_rl.service.sampling import sequences
from async_rl.service.store import Checkpoint, Run, Sampler, Session, Store
from async_rl.service.work import checkpoint_at

R = TypeVar("R", bound=Value)
_LISTED = "NOT is_gone AND name!='' ORDER BY created_s DESC"


class Lists:
    """The handlers of the routes."""

    def __init__(self, store: Store, model: Model) -> None:
        self._store = store
        self._model = model

    def sessions(self, call: Call) -> Json:
        """Return the sessions, newest first."""
        rows, _ = self._page(Session, "TRUE ORDER BY created_s DESC", call)
        return {"sessions": [session.session_id for session in rows]}

    def session(self, call: Call) -> Json:
        """Return what a session has made."""
        session_id = call.path["session_id"]
        session = self._store.known(Session, session_id)
        runs = self._store.all(Run, "session_id=?", session_id)
        samplers = self._store.all(Sampler, "session_id=?", session_id)
        return {
            "training_run_ids": [run.run_id for run in runs],
            "sampler_ids": [sampler.sampler_id for sampler in samplers],
            "user_metadata": msgspec.Raw(session.user_metadata.encode()),
            "display_name": session.display_name,
        }

    def runs(self, call: Call) -> Json:
        """Return the training runs, newest first."""
        rows, cursor = self._page(Run, "TRUE ORDER BY rowid DESC", call)
        return {"training_runs": [self._shown(run) for run in rows], "cursor": cursor}

    def run(self, call: Call) -> Json:
        """Return one training run."""
        return self._shown(self._store.known(Run, call.path["run_id"]))

    def checkpoints(self, call: Call) -> Json:
        """Return the checkpoints of all runs, newest first."""
        rows, cursor = self._page(Checkpoint, _LISTED, call)
        return {"checkpoints": [_shown_checkpoint(row) for row in rows], "cursor": cursor}

    def run_checkpoints(self, call: Call) -> Json:
        """Return the checkpoints of one run."""
        run = self._store.known(Run, call.path["run_id"])
        rows = self._store.all(Checkpoint, f"run_id=? AND {_LISTED}", run.run_id)
        return {"checkpoints": [_shown_checkpoint(row) for row in rows]}

    def _page(self, kind: type[R], where: str, call: Call) -> tuple[list[R], Json]:
        try:
            page = msgspec.convert(call.query, forms.Page, strict=False)
        except msgspec.ValidationError as error:
            raise DataError(f"bad query: {error}") from error
        rows = self._store.all(kind, where)
        shown = rows[page.offset : page.offset + page.limit]
        return shown, {**msgspec.structs.asdict(page), "total_count": len(rows)}

    def _shown(self, run: Run) -> Json:
        query = "SELECT max(accepted_s) FROM requests WHERE owner=?"
        rows = self._store.all(Checkpoint, f"run_id=? AND {_LISTED}", run.run_id)
        # The rows are the newest first, and of each kind the last one here stays.
        newest = {row.kind: _shown_checkpoint(row) for row in reversed(rows)}
        return {
            "training_run_id": run.run_id,
            "base_model": self._model.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": _iso(self._store.number(query, run.run_id)),
            "user_metadata": msgspec.Raw(run.user_metadata.encode()),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
        }

    def capabilities(self, call: Call) -> Json:
        """Return the base model."""
        model = self._model
        served = {"max_context_length": model.context_tokens, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": model.name, **served}]}

    def get_info(self, call: Call) -> Json:
        """Return the model of a training run."""
        run = self._store.known(Run, call.read(forms.Named).model_id)
        model = self._model
        names = {"model_name": model.name, "tokenizer_id": model.tokenizer}
        head = {"type": "get_info", "model_id": run.run_id, "model_data": names}
        return {**head, "is_lora": True, "lora_rank": run.rank}

    def sampler(self, call: Call) -> Json:
        """Return a sampling session."""
        sampler = self._store.known(Sampler, call.path["sampler_id"])
        head = {"sampler_id": sampler.sampler_id, "base_model": self._model.name}
        return {**head, "model_path": sampler.model_path}

    def sequence(self, call: Call) -> Json:
        """Return a sampled sequence with the version of each token."""
        drawn = sequences(self._store)(call.path["sequence_id"])
        arrays = {"tokens": drawn.tokens, "logprobs": drawn.logprobs, "versions": drawn.versions}
        return {"model_id": drawn.run_id, **{name: it.tolist() for name, it in arrays.items()}}

    def weights_info(self, call: Call) -> Json:
        """Return how a checkpoint can be loaded."""
        found = checkpoint_at(self._store, call.read(forms.Named).tinker_path)
        run = self._store.known(Run, found.run_id)
        lora = msgspec.json.decode(run.lora)
        base = {"base_model": self._model.name, "is_lora": True, "lora_rank": run.rank}
        return {**base, **{name: lora[name] for name in lora if name.startswith("train_")}}


def _shown_checkpoint(row: Checkpoint) -> Json:
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": kinds[row.kind],
        "time": _iso(row.created_s),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "user_metadata": msgspec.Raw(row.user_metadata.encode()),
        "expires_at": None if row.expires_s is None else _iso(row.expires_s),
    }


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
