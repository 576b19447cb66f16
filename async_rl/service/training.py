"""Executes the requests of training runs on one base model.

Invariants
- The same requests of a run give the same bits, whatever other runs do in between and wherever the
  process was killed: a state is saved only if no gradient waits for its step, and the front sends
  the requests after it again.
- A refused request changes nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from async_rl.config.learner import CACHE_TOKENS
from async_rl.config.run import RunConfig
from async_rl.core.checksums import checksum, sum_of
from async_rl.core.errors import ConfigError, DataError, Unavailable
from async_rl.core.types import FloatArray
from async_rl.protocol.service import (
    CHANGING,
    Execute,
    Executed,
    Position,
)
from async_rl.service.batches import Limits, by_example, check_data, pack_rows, run_row
from async_rl.service.forms import CreateModel, Load, OptimStep, read
from async_rl.service.losses import find_loss
from async_rl.service.proto import forward_backward_output, parse_forward_backward
from async_rl.service.states import States, read_numbers, read_tensors, write_state, written
from async_rl.service.tenants import AdapterShape, Tenant, load_base, shape_of
from async_rl.weights.adapters import write_peft

_SAVE_S = 10.0
"""Seconds of work after which the state of a run is saved: a kill repeats about that much."""
_LEAST_EPS = 1e-30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class TrainingRuns:
    """The training runs of a service. Its calls block, and come from one thread.

    reports: number and metrics of each optimizer step, until the caller removes them.
    """

    def __init__(
        self,
        config: RunConfig,
        model_path: Path,
        directory: Path,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the base model. directory: of all runs.

        Raises ConfigError for a model that cannot be trained.
        """
        adapter = config.model.adapter
        assert adapter is not None, "checked with the configuration"
        self._adapter = adapter
        self._model_path = model_path
        self._directory = directory
        self._device = device
        self._clock = clock
        self._policy = load_base(config, model_path, device)
        self._base_sha256 = sum_of(model_path.glob("*.safetensors")).hex()
        text = self._policy.lm.config.get_text_config()
        budget = config.learner.budget_tokens
        self._limits = Limits(
            vocab_size=text.vocab_size,
            # Some models have no limit.
            most_tokens=min(budget, text.to_dict().get("max_position_embeddings", budget)),
            # On a CPU a larger row is slower.
            budget_tokens=budget if device.type == "cuda" else min(budget, CACHE_TOKENS),
        )
        self._chunk_tokens = self._policy.chunk_tokens(config.learner.logits_chunk_mb)
        # None: the state is known, and there is none.
        self._runs: dict[str, Tenant | None] = {}
        self.reports: list[tuple[int, dict[str, float]]] = []
        folders = directory.glob("*.train.*")
        self._versions = {it.name: States(it, self._base_sha256).version for it in folders}

    @property
    def num_steps(self) -> int:
        """The optimizer steps of all runs."""
        return sum(self._versions.values())

    def _states(self, run_id: str) -> States:
        return States(self._directory / _folder(run_id), self._base_sha256)

    def position(self, run_id: str) -> Position:
        """Load the state of a run, unless it is in memory, and say which one it is.

        Raises DataError if the run has states and all are damaged.
        """
        if run_id not in self._runs:
            self._runs[run_id] = None
            newest = self._states(run_id).newest()
            if newest is not None:
                path, numbers = newest
                run = self._add(run_id, numbers.shape, seed=0)
                read_tensors(path, run, numbers, with_moments=True)
                run.seq_id = numbers.seq_id
                run.version = numbers.version
                run.answer = numbers.answer
        known = self._runs[run_id]
        if known is None:
            return Position(seq_id=-1, version=0)
        return Position(seq_id=known.seq_id, version=known.version)

    def _add(self, run_id: str, shape: AdapterShape, *, seed: int) -> Tenant:
        run = Tenant(self._policy, run_id, shape, self._adapter, seed=seed)
        self._runs[run_id] = run
        return run

    def execute(self, request: Execute) -> Executed:
        """Execute a request. A user's fault is in the answer; raises Unavailable if the state of
        the run was not asked for.
        """
        run_id = request.run_id
        if run_id not in self._runs:
            raise Unavailable(f"{run_id} is not in memory; ask for its position first")
        started_s = self._clock()
        is_changing = request.operation in CHANGING
        run = self._runs[run_id]
        if run is not None and is_changing and request.seq_id <= run.seq_id:
            is_newest = request.seq_id == run.seq_id
            error = "" if is_newest else f"request {request.seq_id} is before {run.seq_id}"
            return self._executed(run, run.answer if is_newest else b"", error=error)
        try:
            body, tokens = self._perform(run, request)
        except (ConfigError, DataError, torch.OutOfMemoryError) as error:
            return self._executed(run, b"", error=str(error))
        run = self._runs[run_id]
        assert run is not None, "every operation needs a run or makes one"
        if is_changing:
            run.seq_id = request.seq_id
            run.answer = body
        run.unsaved_s += self._clock() - started_s
        # A checkpoint may be deleted, so its loading cannot be repeated.
        is_final = request.operation in ("load_weights", "unload_model")
        if is_final or run.unsaved_s >= _SAVE_S:
            self._save(run)
        executed = self._executed(run, body, tokens=tokens)
        if request.operation == "unload_model":
            self.release(run_id)
        return executed

    def _executed(
        self, run: Tenant | None, body: bytes, *, tokens: int = 0, error: str = ""
    ) -> Executed:
        return Executed(
            body=body,
            version=run.version if run else 0,
            saved_seq_id=self._states(run.run_id).covered if run else -1,
            tokens=tokens,
            error=error,
        )

    def _save(self, run: Tenant) -> None:
        """Save the state, unless gradients wait for their step."""
        if not run.has_gradients:
            self._states(run.run_id).save(run)
            run.unsaved_s = 0.0

    def release(self, run_id: str) -> None:
        """Save the state of a run and free its memory."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            self._save(run)
            run.close()

    def close(self) -> None:
        """Save the states of all runs."""
        for run_id in list(self._runs):
            self.release(run_id)

    def _perform(self, run: Tenant | None, request: Execute) -> tuple[bytes, int]:
        """Return the body of the answer and the number of tokens computed."""
        path = Path(request.path)
        match request.operation:
            case "create_model":
                self._create(request.run_id, request.body)
                return b"", 0
            case "load_weights":
                self._load(run, request.run_id, path, read(request.body, Load))
                return b"", 0
        if run is None:
            raise DataError(f"{request.run_id} does not exist: its create_model was refused")
        match request.operation:
            case "forward" | "forward_backward":
                return self._forward(run, request)
            case "optim_step":
                return self._step(run, request.body), 0
            case "save_weights":
                write_state(path, run, self._base_sha256)
            case "save_weights_for_sampler":
                with written(path) as partial:
                    self._write_adapter(run, partial)
            case "save_weights_external":
                with written(path) as partial:
                    run.export(partial)
                    self._copy_tokenizer(partial)
            case "unload_model":
                run.forget_gradients()
        return b"", 0

    def _create(self, run_id: str, body: bytes) -> None:
        wanted = read(body, CreateModel).lora_config
        if self._runs[run_id] is not None:
            raise DataError(f"{run_id} exists already")
        if wanted is None:
            raise DataError("create_model has no lora_config; give it a rank")
        shape = shape_of(
            self._policy.lm,
            self._adapter,
            rank=wanted.rank,
            attention=wanted.train_attn,
            mlp=wanted.train_mlp,
        )
        # Not at random: executed again, it has to be the same.
        self._add(run_id, shape, seed=checksum(run_id) if wanted.seed is None else wanted.seed)

    def _load(self, run: Tenant | None, run_id: str, path: Path, wanted: Load) -> None:
        if not path.is_dir():
            raise DataError(f"there is no checkpoint {wanted.path}")
        numbers = read_numbers(path, self._base_sha256)
        if run is not None and run.has_gradients:
            raise DataError("gradients wait for their optim_step; load before forward_backward")
        is_new = run is None
        if run is None:
            run = self._add(run_id, numbers.shape, seed=0)
        read_tensors(path, run, numbers, with_moments=wanted.optimizer)
        run.version += not is_new

    def _forward(self, run: Tenant, request: Execute) -> tuple[bytes, int]:
        """forward_backward and forward."""
        parsed = parse_forward_backward(request.body)
        loss, config = find_loss(parsed.loss_fn, parsed.config)
        examples = check_data(parsed.data, loss, config, self._limits)
        is_training = request.operation == "forward_backward"
        logprobs: dict[int, FloatArray] = {}
        total = 0.0
        run.use()
        with run.accumulating() if is_training else torch.no_grad():
            for row in pack_rows(examples, self._limits, self._device):
                of_row, row_loss = run_row(self._policy, row, loss, self._chunk_tokens)
                if is_training:
                    torch.autograd.backward(row_loss)
                total += float(row_loss.detach())
                logprobs.update(by_example(row, of_row))
        num_tokens = sum(len(example.tokens) for example in examples)
        if is_training:
            run.num_tokens += num_tokens
            run.loss += total
        in_order = [logprobs[index] for index in range(len(examples))]
        return forward_backward_output(in_order, {"loss:sum": total}), num_tokens

    def _step(self, run: Tenant, body: bytes) -> bytes:
        adam = read(body, OptimStep).adam_params
        if adam.eps < _LEAST_EPS:
            raise DataError(f"adam_params.eps={adam.eps:g}: 0 / 0 for a gradient of 0; use 1e-12")
        norm = run.step(adam)
        self._versions[_folder(run.run_id)] = run.version
        scalars = {
            "loss/policy": run.loss / max(run.num_tokens, 1),
            "policy/grad_norm": norm,
            "policy/lr": adam.learning_rate,
            "tokens/trained": float(run.num_tokens),
        }
        self.reports.append((self.num_steps, scalars))
        run.num_tokens = 0
        run.loss = 0.0
        return msgspec.json.encode({"type": "optim_step", "metrics": {"grad_norm": norm}})

    def _write_adapter(self, run: Tenant, directory: Path) -> None:
        adapter = run.adapter()
        write_peft(
            directory,
            adapter.to_bytes(),
            adapter.scaling,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self._model_path),
        )

    def _copy_tokenizer(self, directory: Path) -> None:
        """Copy what the base model's directory has besides weights."""
        for file in self._model_path.iterdir():
            is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
            if file.is_file() and not is_weights and not (directory / file.name).exists():
                shutil.copyfile(file, directory / file.name)


def _folder(run_id: str) -> str:
    return run_id.replace(":", ".")
