"""vLLM's AsyncLLM with its engine core in a thread of the same process.

By default vLLM runs the core of an AsyncLLM in a separate process, and on CPU the model in a third
one. For a small model on few cores that costs 20 s of imports, and in every step the
serialisation of the new tokens. `ThreadedCore` replaces AsyncLLM's client of that process.

Loop of the thread: takes calls and requests from its queue; steps the engine while it has requests;
sends the outputs of a request once it has finished; woken by the queue when idle.

Invariants
- Calls run between two engine steps, in the order they were made; the scheduler has no step in
  flight then.
- Every change of weights finishes with `resume_scheduler`, where scheduler.py separates the
  prefix caches of two versions.
- Tokens are kept until their request finishes or the label of the weights changes, so all tokens of
  an output have the same label.

Written against vLLM 0.32.
"""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsLists

from async_rl.core.types import FloatArray
from async_rl.generation.vllm.sampling import WrittenLogprobs

# A step takes milliseconds; a thread that hangs for longer is left to die with the process.
_STOP_TIMEOUT_S = 10.0
# vLLM wants token ids and ranks next to the log-probs; nothing here reads them.
_ONE_ENTRY = np.zeros((1, 1), np.int64)


@dataclass(slots=True)
class _Unsent:
    """Tokens of a request that are not in an output yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)

    def merged_logprobs(self) -> LogprobsLists | None:
        """The log-probs of all tokens as one entry."""
        if not self.logprobs:
            return None
        entry = np.empty((1, 1), object)
        entry[0, 0] = WrittenLogprobs(np.concatenate(self.logprobs))
        return LogprobsLists(_ONE_ENTRY, entry, _ONE_ENTRY[0])


class ThreadedCore(EngineCoreClient):
    """The client that AsyncLLM calls, and the thread that steps the engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # The part of vLLM's client resources that AsyncLLM reads.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A core that dies fails these, so no caller waits for an answer that never comes.
        self._answers: set[asyncio.Future[Any]] = set()
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._unsent: dict[str, _Unsent] = {}
        """Of all requests but those whose outputs are read after every step."""
        self._core = EngineCore(vllm_config, executor_class, log_stats)
        # A daemon: a process that fails elsewhere must not wait for this thread, which may wait
        # for requests.
        self._thread = threading.Thread(target=self._run, name="vllm-core", daemon=True)
        self._thread.start()

    # ---- the thread

    def _run(self) -> None:
        """Step until `shutdown`, or until a step or a call fails: then all requests in flight fail
        with it.
        """
        try:
            while self._take_calls():
                outputs, is_executed = self._core.step_fn()
                self._core.post_step(is_executed)
                self._send(outputs.get(0), self._core.get_weight_version())
        finally:
            cause = sys.exception()
            self.resources.engine_dead = True
            self._post(
                self._fail_all,
                EngineDeadError(
                    f"{type(cause).__name__}: {cause}" if cause else "the engine was closed"
                ),
                cause,
            )
            self._core.shutdown()

    def _fail_all(self, error: EngineDeadError, cause: BaseException | None) -> None:
        error.__cause__ = cause
        if cause is not None:
            self._outputs.put_nowait(error)
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)

    def _take_calls(self) -> bool:
        """Run the queued calls; wait while no request can be stepped. Returns False to stop."""
        while True:
            is_idle = not self._core.scheduler.has_requests() or self._core.is_scheduler_paused()
            if not is_idle and self._calls.empty():
                return True
            call = self._calls.get()
            if call is None:
                return False
            call()

    def _send(self, outputs: EngineCoreOutputs | None, label: str) -> None:
        """Send the requests that have finished or are read after every step; keep the tokens of the
        other requests.
        """
        if outputs is None:
            return
        ready = []
        for output in outputs.outputs:
            unsent = self._unsent.get(output.request_id)
            if unsent is None:
                ready.append(output)
                continue
            unsent.token_ids += output.new_token_ids
            if (lists := output.new_logprobs) is not None:
                # Column 0 is the sampled token. A step has the columns of its widest request.
                unsent.logprobs.append(lists.logprobs[:, 0])
            if output.finish_reason is not None:
                del self._unsent[output.request_id]
                output.new_token_ids = unsent.token_ids
                output.new_logprobs = unsent.merged_logprobs()
                ready.append(output)
        if ready:
            outputs.outputs = ready
            outputs.weight_version = label
            self._post(self._outputs.put_nowait, outputs)

    def _send_all(self, label: str) -> None:
        """Send all tokens that are kept, as sampled by the weights of `label`."""
        outputs = []
        for request_id, unsent in self._unsent.items():
            if unsent.token_ids:
                outputs.append(
                    EngineCoreOutput(
                        request_id=request_id,
                        new_token_ids=unsent.token_ids,
                        new_logprobs=unsent.merged_logprobs(),
                    )
                )
                self._unsent[request_id] = _Unsent()
        if outputs:
            self._post(
                self._outputs.put_nowait, EngineCoreOutputs(outputs=outputs, weight_version=label)
            )

    def _post(self, function: Callable[..., object], *args: object) -> None:
        """Call the function in the event loop, unless that is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ---- calls from the event loop

    async def _call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call the function in the thread between two steps. If it raises, the core dies."""
        answer = self._loop.create_future()

        def run() -> None:
            # A future belongs to its event loop; other threads must not set it.
            self._post(_settle, answer, function(*args))

        self._require_alive()
        self._answers.add(answer)
        self._calls.put(run)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def _require_alive(self) -> None:
        if self.resources.engine_dead or not self._thread.is_alive():
            raise EngineDeadError("the thread of the engine core has exited")

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs; raises EngineDeadError once the core has died."""
        outputs = await self._outputs.get()
        if isinstance(outputs, BaseException):
            raise outputs
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request; it starts with the next step."""
        self._require_alive()
        self._calls.put(lambda: self._add(request))

    def _add(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None, "no request is for an embedding"
        # vLLM looks for texts in each output, and alternatives do not fit into one entry.
        if not (params.stop or params.logprobs or params.prompt_logprobs is not None):
            self._unsent[request.request_id] = _Unsent()
        self._core.add_request(*self._core.preprocess_add_request(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests and free their memory."""
        if request_ids and not self.resources.engine_dead:
            self._calls.put(lambda: self._abort(request_ids))

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._unsent.pop(request_id, None)

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        """Return the tasks of the model."""
        tasks: tuple[SupportedTask, ...] = await self._call(self._core.get_supported_tasks)
        return tasks

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        results: list[Any] = await self._call(
            self._core.collective_rpc, method, timeout, args, kwargs
        )
        return results

    async def beside_async(self, method: str, *args: object) -> list[Any]:
        """Call a method of the worker while the engine continues to step; an error concerns the
        caller only.
        """
        self._require_alive()
        results: list[Any] = await asyncio.to_thread(self._core.collective_rpc, method, None, args)
        return results

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """Make no step until `resume_scheduler_async`."""
        await self._call(self._core.pause_scheduler, mode, clear_cache)

    async def set_weight_version_async(self, weight_version: str) -> None:
        """Label all later tokens."""
        await self._call(self._set_weight_version, weight_version)

    def _set_weight_version(self, weight_version: str) -> None:
        # Tokens of the old weights get their label before it changes.
        self._send_all(self._core.get_weight_version())
        self._core.set_weight_version(weight_version)

    async def resume_scheduler_async(self) -> None:
        """Continue to step."""
        await self._call(self._core.resume_scheduler)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its step. Safe to call twice."""
        self._calls.put(None)
        self._thread.join(timeout or _STOP_TIMEOUT_S)


def _settle(answer: asyncio.Future[Any], result: object) -> None:
    if not answer.done():
        answer.set_result(result)
