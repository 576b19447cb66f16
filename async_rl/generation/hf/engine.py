"""The transformers engine: for debugging, and for models that vLLM does not know.

Slow and simple, with the invariants of engine.py. Requests with equal sampling settings are
batched; a batch runs in a thread through transformers' `generate` until its last sample finishes,
then the next batch starts. Between two tokens the thread lets other calls use the model: new
weights, or a probe. To sleep, a batch stops after its token and drops its cache; after the next
load its unfinished samples continue from the tokens that exist. New weights are copied out of their
source and verified before the model changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import (
    ModelFacts,
    OpenEngine,
    read_model_facts,
    require_version,
)
from async_rl.generation.environment import uses_gpu
from async_rl.generation.hf.decoding import DecodeBatch, ModelLock, Request
from async_rl.protocol.generator import Completion, LoadReport
from async_rl.protocol.weights import SHARED_BLOCK, DeviceBlock, Manifest, SharedBlock, Source
from async_rl.weights.block import verify_block
from async_rl.weights.routes import Receivers

_NO_TOKEN = (1 << 31) - 1
"""An id that no vocabulary has: without one, transformers uses the end tokens that the model names.
"""


def hf_opener(config: RunConfig, model_path: Path, seed: int) -> OpenEngine:
    """Return the function that loads the model in a thread and starts the engine."""
    facts = read_model_facts(model_path)

    def load() -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        return model.to("cuda" if uses_gpu(config) else "cpu").eval()

    async def open_engine() -> HfEngine:
        try:
            model = await asyncio.to_thread(load)
        except (ValueError, OSError) as error:
            raise ConfigError(f"transformers refused the model in {model_path}: {error}") from error
        return HfEngine(config, model, facts, seed)

    return open_engine


class HfEngine:
    """`generate` of transformers behind the `Engine` interface."""

    def __init__(self, config: RunConfig, model: Any, facts: ModelFacts, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._max_samples = config.generation.vllm.max_num_seqs
        # Any id will do: padding is masked, and not every model names a padding token.
        self._pad_token_id = facts.end_token_ids[0]
        self._end_token_ids = () if config.data.ignores_end else facts.end_token_ids
        self._device: torch.device = model.device
        self.version = NO_VERSION
        """Version of the current weights."""
        self._receivers = Receivers(0, self._device)
        self._lock = ModelLock()
        self._waiting: list[Request] = []
        self._has_waiting = asyncio.Event()
        # While it is not set, a batch stops after its token; the next load continues its samples.
        self._awake = asyncio.Event()
        self._awake.set()
        self._running: list[Request] = []
        self._runner = asyncio.create_task(self._run_batches(), name="batches")
        self._runner.add_done_callback(self._fail_all)

    def _require_open(self) -> None:
        if self._runner.done():
            raise Unavailable(
                "the transformers engine is closed or died; start the generator again"
            )

    def _require_usable(self) -> None:
        require_version(self.version)
        self._require_open()

    async def close(self) -> None:
        """End the batch after its token, and with it all requests in flight."""
        for request in (*self._waiting, *self._running):
            request.is_aborted = True
        self._runner.cancel()
        await asyncio.wait([self._runner])
        # The thread of a cancelled batch returns at its next token.
        await asyncio.to_thread(self._wait_until_free)
        self._receivers.close()

    def _wait_until_free(self) -> None:
        with self._lock:
            return

    def _fail_all(self, runner: asyncio.Task[None]) -> None:
        cause = None if runner.cancelled() else runner.exception()
        for request in (*self._waiting, *self._running):
            request.finished.put_nowait(
                Unavailable(
                    f"the transformers engine stopped: {cause or 'closed'}; start the generator"
                    " again"
                )
            )

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion as it finishes."""
        self._require_usable()
        request = Request(
            request_id=request_id,
            prompt=list(prompt_token_ids),
            num_samples=num_samples,
            sampling=sampling,
        )
        self._waiting.append(request)
        self._has_waiting.set()
        try:
            for _ in range(num_samples):
                done = await request.finished.get()
                # Errors come through the queue, so that they cannot overtake finished samples.
                if isinstance(done, Unavailable):
                    raise done
                yield done
        finally:
            request.is_aborted = True

    async def _run_batches(self) -> None:
        """takes: waiting requests with equal sampling; waits for: a request; returns: completions;
        woken by: generate.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._has_waiting.wait()
            self._running = self._next_requests()
            if self._running:
                batch = DecodeBatch(self._running)
                while batch.rows:
                    await self._awake.wait()
                    await asyncio.to_thread(self._write, batch, loop)
                    batch.drop_finished()
            self._running = []
            if not self._waiting:
                self._has_waiting.clear()

    def _next_requests(self) -> list[Request]:
        """Remove from the queue the requests of the next batch."""
        waiting = [request for request in self._waiting if not request.is_aborted]
        chosen: list[Request] = []
        room = self._max_samples
        for request in waiting:
            # The first request always fits, also one with more samples than max_num_seqs.
            has_room = not chosen or request.num_samples <= room
            if has_room and request.sampling == waiting[0].sampling:
                chosen.append(request)
                room -= request.num_samples
        self._waiting = [request for request in waiting if request not in chosen]
        return chosen

    def _write(self, batch: DecodeBatch, loop: asyncio.AbstractEventLoop) -> None:
        """Continue the samples until the last one finishes or the engine is to sleep."""
        input_ids, mask = batch.padded(self._pad_token_id, self._device)
        is_sampled = batch.sampling.temperature > 0
        settings = GenerationConfig(
            do_sample=is_sampled,
            # The whole vocabulary; a greedy configuration may not name it.
            **({"top_k": 0} if is_sampled else {}),
            max_new_tokens=batch.num_remaining,
            eos_token_id=list(self._end_token_ids) or [_NO_TOKEN],
            pad_token_id=self._pad_token_id,
        )

        def after_token(written: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion of transformers: written int64 [B, L] with the new token last ->
            bool [B], True where the sample needs no more tokens.
            """
            finished = batch.record(written[:, -1], self.version, self._end_token_ids)
            # The thread of a cancelled batch may outlive the event loop.
            if not loop.is_closed():
                for request, done in finished:
                    loop.call_soon_threadsafe(request.finished.put_nowait, done)
            # New weights can only come in this call, so a token has the version of its whole step.
            if self._awake.is_set():
                self._lock.give_way()
            is_awake = self._awake.is_set()
            stops = [not (is_awake and row.is_open) for row in batch.rows]
            return torch.tensor(stops, device=written.device)

        with self._lock, torch.no_grad():
            if not self._awake.is_set():
                return
            # `generate` draws from the global generator; no other thread draws under the lock.
            torch.manual_seed(batch.seed(self._seed))
            self._model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=[batch.temper],
                stopping_criteria=[after_token],
            )

    async def sleep(self) -> None:
        """End the batch after its token, and move the model off the device."""
        self._require_open()
        self._awake.clear()
        await asyncio.to_thread(self._leave_device)

    def _leave_device(self) -> None:
        with self._lock:
            self._model.to("cpu")
            # torch keeps freed memory for itself, where the learner cannot use it.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    async def weight_devices(self) -> list[str]:
        """One rank."""
        return [self._receivers.device_name]

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Copy and verify the version next to the batch, then change tensors between two tokens."""
        self._require_open()
        if isinstance(source, DeviceBlock):
            raise WeightsError(
                "the transformers engine cannot map GPU memory; set weights.transfer=auto, or"
                " generation.engine=vllm"
            )
        started_s = time.perf_counter()
        tensors = await asyncio.to_thread(_copy_out, manifest, source, self._receivers)
        pause_s = await asyncio.to_thread(self._exchange, manifest.version, tensors)
        self._awake.set()
        return LoadReport(
            version=manifest.version, load_s=time.perf_counter() - started_s, pause_s=pause_s
        )

    def _exchange(self, version: int, tensors: dict[str, torch.Tensor]) -> float:
        parameters = dict(self._model.named_parameters())
        missing = parameters.keys() - tensors.keys()
        if missing:
            raise WeightsError(
                f"{len(missing)} parameters got no weights, among them {min(missing)}; push all"
                " tensors of the model"
            )
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape:
                raise WeightsError(
                    f"{name} has shape {list(tensors[name].shape)}, the model wants"
                    f" {list(parameter.shape)}"
                )
        with self._lock:
            started_s = time.perf_counter()
            # It sleeps in main memory; awake this does nothing.
            self._model.to(self._device)
            for name, parameter in parameters.items():
                parameter.data = tensors[name].to(self._device, parameter.dtype)
            self.version = version
            return time.perf_counter() - started_s

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Score the rows between two tokens of the running batch."""
        self._require_usable()
        return await asyncio.to_thread(self._score, rows)

    def _score(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        scores = []
        with self._lock, torch.no_grad():
            for row in rows:
                # A copy: arrays decoded from a message are read-only, and torch warns about them.
                ids = torch.tensor(row, dtype=torch.int64, device=self._device)[None]
                table = self._model(ids).logits[0, :-1].float().log_softmax(-1)
                picked = table.gather(-1, ids[0, 1:, None])[:, 0]
                score = np.zeros(len(row), np.float32)
                score[1:] = picked.cpu().numpy()
                scores.append(score)
        return scores


def _copy_out(manifest: Manifest, source: Source, receivers: Receivers) -> dict[str, torch.Tensor]:
    is_shared = isinstance(source, SharedBlock)
    if is_shared:
        verify_block(manifest)
    with receivers.receive(manifest, source) as received:
        # The learner writes its next version into the shared block; other media deliver copies.
        return {name: view.clone() if is_shared else view for name, view in received}
