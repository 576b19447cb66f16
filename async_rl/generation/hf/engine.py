"""The transformers engine: for debugging, and for models that vLLM does not know.

Slow and simple, with the invariants of engine.py. One thread does all work with the model, in the
order in which it was requested: the next token of a request's samples, new weights, a probe. So
requests take turns, and the weights change between two tokens. An engine that sleeps writes no
token and drops the caches; after the next load its samples continue from the tokens that exist. New
weights are copied out of their source and verified before the model changes.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from async_rl.batching.support import Grammars
from async_rl.config.run import RunConfig
from async_rl.config.sampling import supports_of
from async_rl.core.errors import ConfigError, DataError, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import OpenEngine, read_model_facts, require_version
from async_rl.generation.environment import uses_gpu
from async_rl.generation.hf.decoding import Samples, scores_of, seed_of
from async_rl.protocol.generator import Completion, LoadReport
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, SharedBlock, Source
from async_rl.weights.block import verify_block
from async_rl.weights.routes import Receivers

T = TypeVar("T")


def hf_opener(config: RunConfig, model_path: Path, seed: int) -> OpenEngine:
    """Return the function that loads the model in a thread and starts the engine."""
    facts = read_model_facts(model_path)
    end_token_ids = () if config.data.ignores_end else facts.end_token_ids

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        if config.generation.head_dtype == "float32":
            head = model.get_output_embeddings()
            # Models whose head has a bias are refused (docs/models.md).
            head.forward = lambda hidden: linear(hidden.float(), head.weight.float())
        return model.to("cuda" if uses_gpu(config) else "cpu").eval()

    async def open_engine() -> HfEngine:
        try:
            model = await asyncio.to_thread(load)
        except (ValueError, OSError) as error:
            raise ConfigError(f"transformers refused the model in {model_path}: {error}") from error
        grammars = Grammars(
            tokenizer=config.data.tokenizer or str(model_path),
            vocab_size=model.config.get_text_config().vocab_size,
            has_code=config.model.trust_remote_code,
        )
        grammars.require(supports_of(config))
        return HfEngine(model, end_token_ids, seed, grammars)

    return open_engine


class HfEngine:
    """A model of transformers behind the `Engine` interface."""

    def __init__(
        self, model: Any, end_token_ids: tuple[int, ...], seed: int, grammars: Grammars
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._end_token_ids = end_token_ids
        self._seed = seed
        self._device: torch.device = model.device
        self.version = NO_VERSION
        """Version of the current weights."""
        self._receivers = Receivers(0, self._device)
        # The only thread that uses the model, so no lock is needed and requests keep their order.
        self._thread = ThreadPoolExecutor(1, "model")
        self._in_flight: set[Samples] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._ended = ""

    async def _do(self, work: Callable[..., T], *arguments: object) -> T:
        """Do work with the model after all earlier work. If it fails, the engine is dead."""
        self._require_open()
        done = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        done.add_done_callback(self._end_if_failed)
        # Work whose caller is cancelled is done nevertheless, before later work starts.
        await asyncio.wait([done])
        if error := done.exception():
            raise self._unavailable() from error
        return done.result()

    def _end_if_failed(self, done: asyncio.Future[Any]) -> None:
        if error := done.exception():
            self._ended = f"{type(error).__name__}: {error}"
            self._awake.set()  # requests that wait for the device fail too

    def _require_open(self) -> None:
        if self._ended:
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"the transformers engine stopped: {self._ended}; start the generator again"
        )

    async def close(self) -> None:
        """Stop after the next token; all requests in flight fail then."""
        self._ended = self._ended or "it was closed"
        self._awake.set()
        await asyncio.to_thread(self._thread.shutdown)
        self._receivers.close()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion as it finishes."""
        require_version(self.version)
        largest = max(prompt_token_ids)
        # The model would fail, and the engine with it.
        if largest >= self._grammars.vocab_size:
            raise DataError(
                f"token id {largest} is not in the vocabulary, whose largest is"
                f" {self._grammars.vocab_size - 1}; send ids of the vocabulary"
            )
        samples = Samples(
            prompt_token_ids,
            num_samples,
            sampling,
            self._end_token_ids,
            self._grammars,
            generator=torch.Generator(self._device).manual_seed(seed_of(request_id, self._seed)),
        )
        self._in_flight.add(samples)
        try:
            while samples.unfinished:
                await self._awake.wait()
                for done in await self._do(self._write, samples):
                    yield done
        finally:
            self._in_flight.discard(samples)

    def _write(self, samples: Samples) -> list[Completion]:
        # The order to sleep may have come since the caller looked.
        if not self._awake.is_set():
            return []
        return samples.write(self._model, self.version)

    async def sleep(self) -> None:
        """Write no further token, and move the model off the device."""
        self._awake.clear()
        await self._do(self._leave_device, list(self._in_flight))

    def _leave_device(self, in_flight: Sequence[Samples]) -> None:
        for samples in in_flight:
            samples.cache = None
        self._model.to("cpu")
        # torch keeps freed memory for itself, where the learner cannot use it.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def weight_devices(self) -> list[str]:
        """One rank."""
        return [self._receivers.device_name]

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Copy and verify the version next to the steps, then change tensors between two tokens."""
        self._require_open()
        tensors = await asyncio.to_thread(_copy_out, manifest, source, self._receivers)
        for name, parameter in self._model.named_parameters():
            found = list(tensors[name].shape) if name in tensors else "missing"
            if found != list(parameter.shape):
                raise WeightsError(
                    f"the model got no weights of {name}: it has shape {list(parameter.shape)}, the"
                    f" version's is {found}; push all tensors of the model"
                )
        pause_s = await self._do(self._exchange, manifest.version, tensors)
        self._awake.set()
        return LoadReport(version=manifest.version, pause_s=pause_s)

    def _exchange(self, version: int, tensors: dict[str, torch.Tensor]) -> float:
        started_s = time.perf_counter()
        # It sleeps in main memory; awake this does nothing.
        self._model.to(self._device)
        for name, parameter in self._model.named_parameters():
            parameter.data = tensors[name].to(self._device, parameter.dtype)
        self.version = version
        return time.perf_counter() - started_s

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Score the rows between two tokens."""
        require_version(self.version)
        return await self._do(self._score, rows)

    @torch.no_grad()
    def _score(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        scores = []
        for row in rows:
            # A copy: arrays decoded from a message are read-only, and torch warns about them.
            ids = torch.tensor(row, dtype=torch.int64, device=self._device)
            score = scores_of(ids, self._model(ids[None]).logits[0], 0).logprobs[:, 0]
            score[0] = 0.0
            scores.append(score)
        return scores


def _copy_out(manifest: Manifest, source: Source, receivers: Receivers) -> dict[str, torch.Tensor]:
    is_shared = isinstance(source, SharedBlock)
    if is_shared:
        verify_block(manifest)
    with receivers.receive(manifest, source) as received:
        # The learner writes its next version into the shared block; other media deliver copies.
        return {name: view.clone() if is_shared else view for name, view in received}
