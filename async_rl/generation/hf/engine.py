"""The transformers engine: for debugging, and for models that vLLM does not know. Slow, simple, the
same promises.

Requests with equal sampling settings are batched; a batch runs in a thread through transformers'
`generate` until its last sample ends, the next batch starts then.  Between two tokens the thread
gives way to whoever wants the model: new weights, or a probe. To rest, a batch ends after its token
and its cache with it; after the next load its unfinished samples go on from what they have written.
Invariants: as in engine.py; new weights are copied out of the shared block or a broadcast, and
verified, before the model is touched.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import Completion, read_model_facts, require_version
from async_rl.generation.environment import uses_gpu
from async_rl.generation.hf.decoding import Recorder, Request, Row, Turn
from async_rl.protocol.generator import LoadReport
from async_rl.protocol.weights import SHARED_BLOCK, DeviceBlock, Manifest, SharedBlock, Source
from async_rl.weights.transport.shared_memory import SharedTensorsReader, tensor_views
from async_rl.weights.transport.table import Receivers

_NO_TOKEN = (1 << 31) - 1
"""An id that no vocabulary has: without one, transformers takes the end tokens that the model
names.
"""


class HfEngine:
    """`generate` of transformers behind the `Engine` interface."""

    def __init__(self, config: RunConfig, model_path: Path, *, seed: int) -> None:
        self._config = config
        self._path = model_path
        self._seed = seed
        self._facts = read_model_facts(model_path)
        self._end_token_ids = () if config.generation.ignore_eos else self._facts.end_token_ids
        self._device = torch.device("cuda" if uses_gpu(config) else "cpu")
        self._version = NO_VERSION
        self._receivers = Receivers(0, self._device)
        self._turn = Turn()
        self._waiting: list[Request] = []
        self._has_waiting = asyncio.Event()
        self._is_asleep = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._running: list[Request] = []
        self._opened: torch.nn.Module | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Version of the weights that write now."""
        return self._version

    @property
    def _model(self) -> Any:
        if self._opened is None or self._runner is None or self._runner.done():
            raise Unavailable(
                "the transformers engine is not started, closed, or died; start the generator again"
            )
        return self._opened

    async def start(self) -> None:
        """Loads the model in a thread."""
        try:
            self._opened = await asyncio.to_thread(self._open)
        except (ValueError, OSError) as error:
            raise ConfigError(f"transformers refused the model in {self._path}: {error}") from error
        self._runner = asyncio.create_task(self._run_batches(), name="batches")
        self._runner.add_done_callback(self._fail_all)

    def _open(self) -> torch.nn.Module:
        torch.manual_seed(self._seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            self._path,
            dtype=getattr(torch, self._config.model.dtype),
            trust_remote_code=self._config.model.trust_remote_code,
        )
        return model.to(self._device).eval()

    async def close(self) -> None:
        """Ends the batch after its token, and with it everything in flight."""
        if self._runner is not None:
            for request in (*self._waiting, *self._running):
                request.is_aborted = True
            self._runner.cancel()
            await asyncio.wait([self._runner])
            # The thread of a cancelled batch leaves at its next token; wait for that.
            await asyncio.to_thread(self._turn.wait_until_free)
        self._opened = None
        self._receivers.close()

    def _fail_all(self, runner: asyncio.Task[None]) -> None:
        cause = None if runner.cancelled() else runner.exception()
        for request in (*self._waiting, *self._running):
            request.finished.put_nowait(
                Unavailable(
                    f"the transformers engine ended: {cause or 'closed'}; start the generator again"
                )
            )

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yields each completion as it finishes."""
        require_version(self._version)
        if sampling.top_p < 1 or sampling.top_k != -1:
            raise ConfigError(
                f"request {request_id}: the transformers engine keeps the full support; set top_p=1"
                " and top_k=-1"
            )
        _ = self._model
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
                if isinstance(done, Unavailable):
                    raise done
                yield done
        finally:
            request.is_aborted = True

    async def _run_batches(self) -> None:
        """takes: waiting requests with equal sampling; waits for: a request; gives: completions;
        woken by: generate.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._has_waiting.wait()
            self._running = self._take_batch()
            rows = [
                Row(request, index)
                for request in self._running
                for index in range(request.num_samples)
            ]
            while rows:
                await self._awake.wait()
                await asyncio.to_thread(self._write, rows, loop)
                rows = [row for row in rows if not (row.is_done or row.request.is_aborted)]
            self._running = []
            if not self._waiting:
                self._has_waiting.clear()

    def _take_batch(self) -> list[Request]:
        waiting = [request for request in self._waiting if not request.is_aborted]
        batch: list[Request] = []
        room = self._config.generation.vllm.max_num_seqs
        for request in waiting:
            if request.sampling == waiting[0].sampling and (
                not batch or request.num_samples <= room
            ):
                batch.append(request)
                room -= request.num_samples
        self._waiting = [request for request in waiting if request not in batch]
        return batch

    def _write(self, rows: list[Row], loop: asyncio.AbstractEventLoop) -> None:
        """Writes the rows on from what they have, until the last one ends or the engine is to rest."""
        sampling = rows[0].request.sampling
        texts = [row.request.prompt + row.token_ids for row in rows]
        longest = max(map(len, texts))
        pad = self._facts.end_token_ids[0]
        input_ids = torch.tensor(
            [[pad] * (longest - len(text)) + text for text in texts], device=self._device
        )
        mask = torch.tensor(
            [[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=self._device
        )
        num_written = [len(row.token_ids) for row in rows]
        is_sampled = sampling.temperature > 0
        settings = GenerationConfig(
            do_sample=is_sampled,
            # The whole vocabulary; a greedy configuration may not name it.
            **({"top_k": 0} if is_sampled else {}),
            max_new_tokens=sampling.max_new_tokens - min(num_written),
            min_new_tokens=sampling.min_new_tokens or None,
            eos_token_id=list(self._end_token_ids) or [_NO_TOKEN],
            pad_token_id=pad,
        )
        with self._turn.held(), torch.no_grad():
            if self._is_asleep:
                return
            # The same groups get the same samples from the same weights, whichever attempt it is: a
            # resumed run repeats itself.
            groups = list(dict.fromkeys(row.request.request_id.partition(".")[0] for row in rows))
            # What is written on must not draw the numbers again that its beginning was drawn with.
            torch.manual_seed(
                zlib.crc32(
                    f"{self._seed} {groups}{num_written if any(num_written) else ''}".encode()
                )
            )
            recorder = Recorder(rows, self, loop)
            self._model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=[recorder.processor],
                stopping_criteria=[recorder],
            )

    def give_way(self) -> int:
        """Called between two tokens: lets others have the model; the version that writes from now
        on.
        """
        if not self._is_asleep:
            self._turn.give_way()
        return self._version

    @property
    def is_asleep(self) -> bool:
        """Whether the batch is to end after this token."""
        return self._is_asleep

    async def sleep(self) -> None:
        """Ends the batch after its token, and takes the model off the device."""
        self._is_asleep = True
        self._awake.clear()
        await asyncio.to_thread(self._leave_device)

    def _leave_device(self) -> None:
        with self._turn.held():
            self._model.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sample."""
        return self._end_token_ids

    async def weight_devices(self) -> list[str]:
        """One rank."""
        return [self._receivers.device_name]

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Copies and verifies the version beside the batch, then changes the tensors between two
        tokens.
        """
        if isinstance(source, DeviceBlock):
            raise WeightsError(
                "the transformers engine maps no memory of a GPU; set weights.transfer=auto, or"
                " generation.engine=vllm"
            )
        started_s = time.perf_counter()
        tensors = await asyncio.to_thread(_copy_out, manifest, source, self._receivers)
        pause_s = await asyncio.to_thread(self._exchange, manifest.version, tensors)
        self._is_asleep = False
        self._awake.set()
        return LoadReport(
            version=manifest.version, load_s=time.perf_counter() - started_s, pause_s=pause_s
        )

    def _exchange(self, version: int, tensors: dict[str, torch.Tensor]) -> float:
        parameters = dict(self._model.named_parameters())
        if missing := parameters.keys() - tensors.keys():
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
        with self._turn.held():
            started_s = time.perf_counter()
            self._model.to(self._device)
            for name, parameter in parameters.items():
                parameter.data = tensors[name].to(self._device, parameter.dtype)
            self._version = version
            return time.perf_counter() - started_s

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Scores the rows between two tokens of the running batch."""
        require_version(self._version)
        return await asyncio.to_thread(self._score, rows)

    def _score(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        scores = []
        with self._turn.held(), torch.no_grad():
            for row in rows:
                ids = torch.tensor(row, dtype=torch.int64, device=self._device)[
                    None
                ]  # a copy: rows that travelled cannot be written
                table = self._model(ids).logits[0, :-1].float().log_softmax(-1)
                picked = table.gather(-1, ids[0, 1:, None])[:, 0]
                scores.append(np.concatenate([np.zeros(1, np.float32), picked.cpu().numpy()]))
        return scores


def _copy_out(manifest: Manifest, source: Source, receivers: Receivers) -> dict[str, torch.Tensor]:
    if not isinstance(source, SharedBlock):
        with receivers.receive(manifest, source) as received:
            return dict(received)
    # One mapping for checksum and copy: the page faults take as long as the copy.
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        tensors = {name: view.clone() for name, view in tensor_views(reader)}
        reader.verify_unchanged()
    return tensors
