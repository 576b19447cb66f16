"""The vLLM engine: token ids in, token ids out, weights changed between two steps.

Several policies may share one LLM: its base model with the adapter of one slot each (vLLM's LoRA).
Slot 0 is this run's policy; the other slots are for programs of a service (rollouts/turns.py).

Invariants
- The label of a token names the version of every policy: label and weights change together, with no
  step in flight, so a token shows the version that sampled it.
- A new version never reads the prefix cache of an older one (scheduler.py).
- An adapter that cannot be read, or that vLLM refuses, changes nothing for any policy.

Weights are verified and, on CPU, loaded and packed before the pause, so a bad block costs nothing
and the pause is an exchange of tensors. Importing this module imports vLLM, which takes seconds.

Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput

from async_rl.batching.support import spans_of
from async_rl.core.calls import Alternatives
from async_rl.core.codec import encode
from async_rl.core.errors import BroadcastBroken, DataError, WeightsError
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import one_completion, require_version
from async_rl.generation.vllm.llm import Llm
from async_rl.generation.vllm.sampling import (
    adapter_in,
    completion_of,
    kept_tokens,
    params_of,
    prompt_scores,
    rollout_params,
    scores_of,
)
from async_rl.protocol.generator import Completion, LoadReport
from async_rl.protocol.service import Sample, Sampled
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, SharedBlock, Source, StoredFile
from async_rl.weights.block import verify_block
from async_rl.weights.lora import write_peft
from async_rl.weights.receiving import opened
from async_rl.weights.tensors import checksum

_PROBE = Sampling(temperature=0.0, max_new_tokens=1, alternatives=Alternatives(num_prompt_top=0))


class VllmEngine:
    """One policy on an LLM behind the `Engine` interface."""

    places: Sequence[VllmEngine] = ()
    """The policies of a service's programs on the LLM."""

    def __init__(self, llm: Llm, end_token_ids: tuple[int, ...]) -> None:
        self._vllm = llm
        self._index = len(self._vllm.policies)
        self._vllm.policies.append(self)
        self._end_token_ids = end_token_ids
        self.version = NO_VERSION
        """Version of the current weights."""
        self._is_asleep = False
        self._lora: LoRARequest | None = None

    async def close(self) -> None:
        """End the engine."""
        await self._vllm.close()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion as it finishes. All samples read one prefill of the prompt through
        the prefix cache.
        """
        self._require_usable()
        support = sampling.support
        params = rollout_params(sampling, num_samples, self._end_token_ids)
        outputs = self._vllm.outputs(request_id, prompt_token_ids, params, lora=self._lora)
        first_s: dict[int, float] = {}
        async with aclosing(outputs):
            async for output in outputs:
                for sample in output.outputs:
                    first_s.setdefault(sample.index, time.monotonic())
                    if not sample.finished():
                        continue
                    if sample.finish_reason == "error" and support.grammar:
                        raise DataError(
                            f"xgrammar fails to compile the grammar {support.grammar[:200]!r} with"
                            " the tokens of the model; simplify it"
                        )
                    scores = scores_of(sample, params.logprobs)
                    num_top = sampling.alternatives.num_top
                    done = completion_of(sample, scores, self._versions(sample), num_top)
                    kept = kept_tokens(sampling, scores)
                    prompt = prompt_scores(output, params.prompt_logprobs)
                    yield msgspec.structs.replace(
                        done,
                        first_s=first_s[sample.index],
                        spans=spans_of(support, len(done.token_ids), self._end_token_ids, kept),
                        prompt=None if params.prompt_logprobs is None else prompt,
                    )

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Score the rows with the current weights, outside the prefix cache."""
        self._require_usable()
        # Requests that run at the same time need different names.
        self._vllm.num_probes += 1
        name = f"probe-{self._vllm.num_probes}"
        scores = [self._row_logprobs(f"{name}-{i}", row) for i, row in enumerate(rows)]
        return await asyncio.gather(*scores)

    async def _row_logprobs(self, request_id: str, row: IntArray) -> FloatArray:
        scored = (await one_completion(self, request_id, row, _PROBE)).prompt
        assert scored is not None, "the request asks for it"
        scores = scored.logprobs[:, 0]
        scores[0] = 0.0
        return scores

    def _versions(self, sample: CompletionOutput) -> IntArray:
        versions = np.full(len(sample.token_ids), NO_VERSION, np.int32)
        # vLLM reports spans, because the weights change between steps and not between tokens.
        for span in sample.weight_versions or ():
            versions[span.start : span.end] = int(span.version.split()[self._index])
        return versions

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences from the policy of this engine if the request names one, else from the
        base model or the adapter of a directory, whose version the request tells.
        """
        self._vllm.require_clean()
        lora = self._lora if request.policy else None
        if request.adapter and not request.policy:
            lora = adapter_in(request.adapter)

        params = params_of(request, self._end_token_ids)
        row = request.token_ids.tolist()
        async with aclosing(self._vllm.outputs(request.request_id, row, params, lora)) as outputs:
            async for output in outputs:
                last = output
        sequences = []
        for sample in sorted(last.outputs, key=lambda sample: sample.index):
            versions = np.full(len(sample.token_ids), request.version, np.int32)
            if request.policy:
                versions = self._versions(sample)
            scores = scores_of(sample, request.num_top)
            sequences.append(completion_of(sample, scores, versions, request.num_top))
        return Sampled(
            sequences=sequences * (request.num_samples // len(sequences)),
            prompt=prompt_scores(last, params.prompt_logprobs),
        )

    async def sleep(self) -> None:
        """On a GPU vLLM sleeps at level 2, which drops the weights: the next load restores all of
        them. On a CPU only the blocks of the cache can be freed.
        """
        async with self._vllm.loading:
            if self._is_asleep:
                return
            if self._vllm.thread is not None:
                await self._vllm.thread.pause_scheduler_async("keep", True)
            else:
                await self._vllm.llm.sleep(level=2, mode="keep")
            self._is_asleep = True

    async def weight_devices(self) -> list[str]:
        """One entry per worker."""
        devices: list[str] = await self._vllm.llm.collective_rpc("weight_device")
        return devices

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Verify the weights while generation continues, then change weights and label between two
        steps.
        """
        async with self._vllm.loading:
            self._vllm.require_clean()
            if isinstance(source, SharedBlock):
                await asyncio.to_thread(verify_block, manifest)
            method, args = await self._stage(manifest, source)
            # If the caller is cancelled, the engine must not remain between two versions.
            switch = asyncio.create_task(
                self._switch(manifest.version, method, args), name=f"weights {manifest.version}"
            )
            return LoadReport(version=manifest.version, pause_s=await asyncio.shield(switch))

    async def _stage(self, manifest: Manifest, source: Source) -> tuple[str, tuple[bytes, ...]]:
        """Do the part that can run next to the engine's steps; returns the workers' method and its
        arguments for the rest.
        """
        args = encode(manifest), encode(source)
        if self._vllm.has_spare:
            _require_whole(await self._vllm.beside("stage_shared_weights", *args))
            return "exchange_shared_weights", ()
        return "load_shared_weights", args

    async def _switch(self, version: int, method: str, args: tuple[bytes, ...]) -> float:
        """Change weights and label together; returns the seconds without generation."""
        core: Any = self._vllm.core
        label = " ".join(
            str(version if policy is self else policy.version) for policy in self._vllm.policies
        )
        # Weights can be loaded only into memory that vLLM has taken back.
        has_slept = self._is_asleep and self._vllm.thread is None
        with self._vllm.dirty_on_error(version):
            if has_slept:
                await self._vllm.llm.wake_up(["weights"])
            else:
                # AsyncLLM.pause_generation would sleep 20 ms after the same call.
                await core.pause_scheduler_async("keep", False)
            paused_s = time.perf_counter()
            # A broken broadcast raises here, so no step follows until a load succeeds.
            _require_whole(await core.collective_rpc_async(method, None, args))
            await core.set_weight_version_async(label)
            # Before the first step with the new weights, whose tokens name the new version.
            self.version = version
            self._is_asleep = False
            if has_slept:
                await self._vllm.llm.wake_up(["kv_cache"])  # wakes the scheduler too
            else:
                await core.resume_scheduler_async()
            return time.perf_counter() - paused_s

    def _require_usable(self) -> None:
        require_version(self.version)
        self._vllm.require_clean()


class AppliedAdapter(VllmEngine):
    """The policy of one slot."""

    def __init__(self, llm: Llm, end_token_ids: tuple[int, ...]) -> None:
        super().__init__(llm, end_token_ids)
        # vLLM's ids start at 1, and 0 is the base model. It requires a path for an adapter; the
        # adapter of a slot has no file.
        self._lora = LoRARequest(f"slot {self._index}", self._index + 1, "pushed")

    async def _stage(self, manifest: Manifest, source: Source) -> tuple[str, tuple[bytes, ...]]:
        assert isinstance(source, StoredFile), "model.lora.slots is the learner's setting too"
        with tempfile.TemporaryDirectory(prefix="async_rl-adapter-") as directory:
            # vLLM reads an adapter from a directory of PEFT's form only; a service has such ones.
            if source.scaling is None:
                directory = source.url
            else:
                await asyncio.to_thread(_fetch_peft, manifest, source, Path(directory))
            refusals = await self._vllm.beside("stage_adapter", self._index + 1, directory)
        for refusal in filter(None, refusals):
            raise WeightsError(
                f"vLLM refuses the adapter of version {manifest.version}: {refusal}; its rank may"
                " be at most model.lora.rank"
            )
        return "apply_adapter", ()


def _fetch_peft(manifest: Manifest, source: StoredFile, directory: Path) -> None:
    """Fetch an adapter and write it as PEFT does. Raises WeightsError if it does not match
    the manifest.
    """
    assert source.scaling is not None
    with opened(source, manifest) as file:
        content = file.read()
    found = checksum(content)
    if found != source.checksum:
        raise WeightsError(
            f"checksum of {source.url} is {found}, announced {source.checksum}; the file was"
            " changed after it was written"
        )
    write_peft(directory, content, source.scaling)


def _require_whole(broken: list[str]) -> None:
    """Raise BroadcastBroken if one of the workers reports it."""
    for reason in filter(None, broken):
        raise BroadcastBroken(reason)
