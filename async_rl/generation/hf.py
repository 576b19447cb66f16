"""The transformers engine: for debugging, and for models that vLLM does not know.

Slow and simple, with the invariants of engine.py. One thread does all work with the model, in the
order in which it was requested: the next token of a request's samples, new weights, a probe. So
requests take turns, and the weights change between two tokens. An engine that sleeps writes no
token and drops the caches; after the next load its samples continue from the tokens that exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import linear, pad
from transformers import AutoModelForCausalLM

from async_rl.batching.support import Grammars, Walk, spans_of, truncate
from async_rl.config.run import RunConfig
from async_rl.config.sampling import supports_of
from async_rl.core.calls import EVERYTHING
from async_rl.core.errors import ConfigError, DataError, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import OpenEngine, read_model_facts, require_version, seed_of
from async_rl.generation.environment import uses_gpu
from async_rl.protocol.generator import Completion, LoadReport, Scores
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, SharedBlock, Source
from async_rl.weights.block import verify_block
from async_rl.weights.receiving import Receivers

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
        self._receivers = Receivers(0, self._device)
        # The only thread that uses the model, so no lock is needed and requests keep their order.
        self._thread = ThreadPoolExecutor(1, "model")
        self._in_flight: set[_Samples] = set()
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
            self._require_open(error)
        return done.result()

    def _end_if_failed(self, done: asyncio.Future[Any]) -> None:
        if error := done.exception():
            self._ended = f"{type(error).__name__}: {error}"
            self._awake.set()  # requests that wait for the device fail too

    def _require_open(self, cause: BaseException | None = None) -> None:
        if self._ended:
            raise Unavailable(
                f"the transformers engine stopped: {self._ended}; start the generator again"
            ) from cause

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
        samples = _Samples(
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

    def _write(self, samples: _Samples) -> list[Completion]:
        # The order to sleep may have come since the caller looked.
        return samples.write(self._model, self.version) if self._awake.is_set() else []

    async def sleep(self) -> None:
        """Write no further token, and move the model off the device."""
        self._awake.clear()
        await self._do(self._leave_device, list(self._in_flight))

    def _leave_device(self, in_flight: Sequence[_Samples]) -> None:
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
        tensors = await asyncio.to_thread(self._copy_out, manifest, source)
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

    def _copy_out(self, manifest: Manifest, source: Source) -> dict[str, torch.Tensor]:
        is_shared = isinstance(source, SharedBlock)
        if is_shared:
            verify_block(manifest)
        with self._receivers.receive(manifest, source) as received:
            # The learner writes its next version into the shared block; other media deliver copies.
            return {name: view.clone() if is_shared else view for name, view in received}

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
            score = _row_scores(ids, self._model(ids[None]).logits[0], 0).logprobs[:, 0]
            score[0] = 0.0
            scores.append(score)
        return scores


class _Samples:
    """Samples of one prompt, all with the same number of tokens. A finished sample is computed
    further until the last one is complete; these tokens are dropped.

    unfinished: the samples that need more tokens. cache: keys and values of all tokens but the
    newest; None = they are computed again.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_samples: int,
        sampling: Sampling,
        end_token_ids: Sequence[int],
        grammars: Grammars,
        *,
        generator: torch.Generator,
    ) -> None:
        self._sampling = sampling
        self._end_token_ids = end_token_ids
        # Samples without limits need no walk, which passes over the vocabulary at each token.
        num_walks = 0 if sampling.support == EVERYTHING else num_samples
        self._walks = [Walk(sampling.support, end_token_ids, grammars) for _ in range(num_walks)]
        self._kept: list[list[IntArray]] = []
        """The tokens that remained, at each position of each sample."""
        self._generator = generator
        self._ids = torch.tensor([prompt] * num_samples, device=generator.device)
        self._logprobs = torch.empty(num_samples, 0)
        self._likeliest: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The log-probs and the ids of the likeliest tokens, at each position [num_samples, K]."""
        self._prompt: Scores | None = None
        self._versions: list[int] = []
        self._first_s = 0.0
        self.unfinished = set(range(num_samples))
        self.cache: Any = None

    @torch.no_grad()
    def write(self, model: Any, version: int) -> list[Completion]:
        """Write one token of each sample; return those that it finishes. version: of the model."""
        new = self._ids if self.cache is None else self._ids[:, -1:]
        wanted = self._sampling.alternatives
        is_scored = wanted.num_prompt_top is not None and not self._versions
        # Only the last logits: those of a whole prompt may be larger than the model.
        output = model(
            new, past_key_values=self.cache, use_cache=True, logits_to_keep=0 if is_scored else 1
        )
        if is_scored:
            self._prompt = _row_scores(self._ids[0], output.logits[0], wanted.num_prompt_top or 0)
        self.cache = output.past_key_values
        # Temperature 0 takes the largest logit, with the log-prob at temperature 1.
        logits = output.logits[:, -1].float()
        if self._walks:
            added = np.stack([walk.added() for walk in self._walks])
            logits = logits + torch.from_numpy(added).to(logits.device)
        logits = logits / (self._sampling.temperature or 1.0)
        support = self._sampling.support
        if self._sampling.temperature and support.is_truncated:
            logits = truncate(logits, support.top_k, support.top_p)
            rows = (logits > -torch.inf).cpu().numpy()
            self._kept.append([row.nonzero()[0].astype(np.int32) for row in rows])
        table = logits.log_softmax(-1)
        if self._sampling.temperature:
            drawn = torch.multinomial(table.exp(), 1, generator=self._generator)
        else:
            drawn = table.argmax(-1, keepdim=True)
        self._ids = torch.cat([self._ids, drawn], 1)
        self._logprobs = torch.cat([self._logprobs, table.gather(-1, drawn).cpu()], 1)
        if wanted.num_top:
            self._likeliest.append(table.topk(wanted.num_top))
        for walk, token_id in zip(self._walks, drawn[:, 0].tolist(), strict=False):
            walk.accept(token_id)
        self._first_s = self._first_s or time.monotonic()
        self._versions.append(version)
        is_last = len(self._versions) == self._sampling.max_new_tokens
        ended = [index for index in self.unfinished if int(drawn[index, 0]) in self._end_token_ids]
        finished = sorted(self.unfinished) if is_last else ended
        self.unfinished -= set(finished)
        return [self._completion(index, is_truncated=index not in ended) for index in finished]

    def _completion(self, index: int, *, is_truncated: bool) -> Completion:
        kept = [samples[index] for samples in self._kept]
        likeliest = None
        if self._likeliest:
            columns = zip(*self._likeliest, strict=True)
            likeliest = _scores(*(torch.stack([part[index] for part in it]) for it in columns))
        return Completion(
            spans=spans_of(self._sampling.support, len(self._versions), self._end_token_ids, kept),
            index=index,
            token_ids=self._ids[index, -len(self._versions) :].cpu().numpy().astype(np.int32),
            logprobs=self._logprobs[index].numpy(),
            versions=np.array(self._versions, np.int32),
            is_truncated=is_truncated,
            first_s=self._first_s,
            likeliest=likeliest,
            prompt=self._prompt,
        )


def _row_scores(row: torch.Tensor, logits: torch.Tensor, num_top: int) -> Scores:
    """Return the log-probs at temperature 1 of each token of a row and of the likeliest tokens at
    its position, as in `Completion.prompt`. row: int64 [L]; logits: [L, V].
    """
    table = logits[:-1].float().log_softmax(-1)
    ids = torch.cat([row[1:, None], table.topk(num_top).indices], 1)
    # A first row: nothing predicts the first token.
    first = (0, 0, 1, 0)
    return _scores(pad(table.gather(-1, ids), first, value=torch.nan), pad(ids, first))


def _scores(logprobs: torch.Tensor, ids: torch.Tensor) -> Scores:
    return Scores(ids=ids.int().cpu().numpy(), logprobs=logprobs.cpu().numpy())
