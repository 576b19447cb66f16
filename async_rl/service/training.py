"""The learner of a training service: it executes the requests of training runs on one base model.

takes: requests from the front, each run's in the order of their numbers
waits for: requests; they are executed one after another in one thread
sends: numbers of each optimizer step to the supervisor
woken by: the front; `stopping` (leave: the front executes again what no state has)

Invariants
- The same requests of a run, from its start or a state, give the same bits, whatever other runs do
  in between. A state has no gradients.
- A refused request changes nothing.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from async_rl.config.learner import CACHE_TOKENS
from async_rl.config.run import RunConfig
from async_rl.core.checksums import sum_of
from async_rl.core.errors import ConfigError, DataError
from async_rl.core.types import FloatArray
from async_rl.learner.loading import learner_device
from async_rl.protocol.base import Message
from async_rl.protocol.service import Execute, Executed
from async_rl.runtime.context import ProcessContext
from async_rl.service.forms import CreateModel, Load, LoraConfig, OptimStep, read
from async_rl.service.losses import Limits, by_example, check_data, find_loss, pack_rows, run_row
from async_rl.service.proto import forward_backward_output, parse_forward_backward
from async_rl.service.tenants import Numbers, Tenant, load_base, read_state, written
from async_rl.weights.lora import remove_adapter, use_adapter

_WRITERS: Mapping[str, Callable[[Tenant, Path], None]] = {
    "save_state": Tenant.write_state,
    "save_weights": Tenant.write_state,
    "save_weights_for_sampler": Tenant.write_weights,
    "save_weights_external": Tenant.export,
}


async def run(context: ProcessContext) -> None:
    """Execute the requests of a service's training runs until the process has to stop."""
    loop = asyncio.get_running_loop()
    device = learner_device(context.config.learner.gpus_each)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer") as thread:
        with context.activity("loading the model"):
            runs = await loop.run_in_executor(
                thread, TrainingRuns, context.config, context.model_path, device
            )

        async def execute(request: Execute) -> Message:
            with context.activity(request.operation.replace("_", " ")):
                executed = await loop.run_in_executor(thread, runs.execute, request)
            context.activity.count("tokens_trained", executed.tokens)
            while runs.reports:
                step, scalars = runs.reports.pop(0)
                context.version = step
                await context.report(step, scalars=scalars)
            return executed

        await context.serve({Execute: execute})
        await context.stopping.wait()


class TrainingRuns:
    """The training runs of a service. Its calls block, and come from one thread.

    policy: the base model; tenants: the runs, by id.  reports: number and metrics of each optimizer
    step, until the caller removes them.
    """

    def __init__(
        self,
        config: RunConfig,
        model_path: Path,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the base model. Raises ConfigError for a model that cannot be trained."""
        self._adapter = config.model.adapter
        self._device = device
        self._clock = clock
        self._load_base = functools.partial(load_base, config, model_path, device)
        self.policy = self._load_base()
        self._base_sha256 = sum_of(model_path.glob("*.safetensors"))
        text = self.policy.lm.config.get_text_config()
        budget = config.learner.budget_tokens
        self._limits = Limits(
            vocab_size=text.vocab_size,
            # Some models have no limit.
            most_tokens=min(budget, text.to_dict().get("max_position_embeddings", budget)),
            # On a CPU a larger row is slower.
            budget_tokens=budget if device.type == "cuda" else min(budget, CACHE_TOKENS),
        )
        self._chunk_tokens = self.policy.chunk_tokens(config.learner.logits_chunk_mb)
        self.tenants: dict[str, Tenant] = {}
        self._stepped_s = clock()
        self.reports: list[tuple[int, dict[str, float]]] = []

    def _add(self, run_id: str, numbers: Numbers) -> Tenant:
        if self._adapter is None:
            # There is one set of weights.
            for other in list(self.tenants):
                self._forget(other)
        run = Tenant(self.policy, run_id, numbers, self._adapter)
        self.tenants[run_id] = run
        return run

    def _forget(self, run_id: str) -> None:
        if self.tenants.pop(run_id, None) is None:
            return
        if self._adapter is None:
            self.policy = self._load_base()
        else:
            remove_adapter(self.policy.lm, run_id)

    def execute(self, request: Execute) -> Executed:
        """Execute a request. A user's fault is in the answer."""
        body = b""
        tokens = 0
        error = ""
        try:
            body, tokens = self._perform(request)
        except (ConfigError, DataError, torch.OutOfMemoryError) as refusal:
            error = str(refusal)
        run = self.tenants.get(request.run_id)
        version = run.numbers.version if run else 0
        return Executed(body=body, version=version, tokens=tokens, error=error)

    def _perform(self, request: Execute) -> tuple[bytes, int]:
        """Return the body of the answer and the number of tokens computed."""
        run_id = request.run_id
        run = self.tenants.get(run_id)
        match request.operation:
            case "create_model":
                lora = read(request.body, CreateModel).lora_config or LoraConfig(rank=0)
                self._add(run_id, Numbers(lora=lora, base_sha256=self._base_sha256))
            case "restore" | "unload_model":
                self._forget(run_id)
                if request.path:
                    numbers, tensors = read_state(Path(request.path), self._base_sha256)
                    self._add(run_id, numbers).restore(numbers, tensors, with_moments=True)
            case "load_weights":
                self._load(run, request)
            case _ if run is None:
                raise DataError(f"{run_id} does not exist: its create_model was refused")
            case "forward" | "forward_backward":
                return self._forward(run, request)
            case "optim_step":
                return self._step(run, request), 0
            case operation:
                with written(Path(request.path)) as partial:
                    _WRITERS[operation](run, partial)
        return b"", 0

    def _load(self, run: Tenant | None, request: Execute) -> None:
        wanted = read(request.body, Load)
        numbers, tensors = read_state(Path(request.path), self._base_sha256)
        if run is not None and run.num_tokens:
            raise DataError("gradients wait for their optim_step; load before forward_backward")
        version = 0 if run is None else run.numbers.version + 1
        run = run or self._add(request.run_id, numbers)
        run.restore(numbers, tensors, with_moments=wanted.optimizer)
        run.numbers.version = version

    def _forward(self, run: Tenant, request: Execute) -> tuple[bytes, int]:
        """forward_backward and forward."""
        parsed = parse_forward_backward(request.body)
        loss, config = find_loss(parsed.loss_fn, parsed.config)
        examples = check_data(parsed.data, loss, config, self._limits)
        is_training = request.operation == "forward_backward"
        logprobs: dict[int, FloatArray] = {}
        loss_sum = 0.0
        use_adapter(self.policy.lm, run.run_id)
        with run.accumulating() if is_training else torch.no_grad():
            for row in pack_rows(examples, self._limits, self._device):
                of_row, row_loss = run_row(self.policy, row, loss, self._chunk_tokens)
                if is_training:
                    row_loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(row_loss.detach())
                logprobs.update(by_example(row, of_row))
        num_tokens = sum(len(example.tokens) for example in examples)
        if is_training:
            run.num_tokens += num_tokens
            run.loss += loss_sum
        in_order = [logprobs[index] for index in range(len(examples))]
        return forward_backward_output(in_order, {"loss:sum": loss_sum}), num_tokens

    def _step(self, run: Tenant, request: Execute) -> bytes:
        adam = read(request.body, OptimStep).adam_params
        norm = run.step(adam)
        scalars = {
            "loss/policy": run.loss / max(run.num_tokens, 1),
            "policy/grad_norm": norm,
            "policy/lr": adam.learning_rate,
            "tokens/trained": float(run.num_tokens),
            "time/step_s": self._clock() - self._stepped_s,
        }
        self._stepped_s = self._clock()
        if request.step:
            self.reports.append((request.step, scalars))
        run.num_tokens = 0
        run.loss = 0.0
        return msgspec.json.encode({"type": "optim_step", "metrics": {"grad_norm": norm}})
