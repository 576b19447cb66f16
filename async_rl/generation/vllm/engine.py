"""The vLLM engine: token ids in, token ids out, weights changed between two steps.

Invariants
- The label of a token is the version of the weights that sampled it: label and weights change
  together, with no step in flight.
- A new version never reads the prefix cache of an older one (scheduler.py).

Weights are verified and, on CPU, loaded and packed before the pause, so a bad block costs nothing
and the pause is an exchange of tensors. Importing this module imports vLLM, which takes seconds.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from async_rl.batching.support import spans_of
from async_rl.core.codec import encode
from async_rl.core.errors import BroadcastBroken, DataError, Unavailable
from async_rl.core.support import NO_ALTERNATIVES
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import require_version
from async_rl.generation.vllm.llm import Llm
from async_rl.generation.vllm.logprobs import ALTERNATIVES, columns_of, logprobs_of
from async_rl.generation.vllm.sampling import EARLIER, draw, prompt_scores
from async_rl.generation.vllm.truncation import LIMITS
from async_rl.protocol.generator import Completion, LoadReport, Scores
from async_rl.protocol.service import Sample, Sampled
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, SharedBlock, Source
from async_rl.weights.block import verify_block

_ONLY_WHEN_FINISHED = 1 << 30
"""Tokens between two outputs of a request: vLLM then reports a sample at its first token and at its
end only.
"""


class VllmEngine:
    """One policy on an LLM behind the `Engine` interface."""

    def __init__(self, llm: Llm, end_token_ids: tuple[int, ...], *, has_spare: bool) -> None:
        """has_spare: the worker stages weights in a second copy of the model."""
        self._vllm = llm
        self._index = len(self._vllm.policies)
        self._vllm.policies.append(self)
        self._has_spare = has_spare
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
        truncates = sampling.temperature > 0 and support.is_truncated
        extra: dict[str, object] = {}
        if truncates:
            extra = {LIMITS: (support.top_k, support.top_p)}
        elif sampling.drafts:
            extra = {EARLIER: sampling.drafts}
        alternatives = sampling.alternatives
        if alternatives != NO_ALTERNATIVES:
            extra[ALTERNATIVES] = True
        num_kept = support.top_k if truncates and support.is_recorded else 0
        grammar = None
        if support.grammar:
            grammar = StructuredOutputsParams(**{support.grammar_kind: support.grammar})
        params = SamplingParams(
            n=num_samples,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            min_tokens=min(support.min_tokens, sampling.max_new_tokens),
            logit_bias=support.logit_bias or None,
            structured_outputs=grammar,
            extra_args=extra or None,
            stop_token_ids=list(self._end_token_ids),
            ignore_eos=not self._end_token_ids,
            logprobs=max(num_kept, alternatives.num_top),
            prompt_logprobs=alternatives.num_prompt_top,
            flat_logprobs=True,
            detokenize=False,
            # With DELTA, vLLM would send each sample in parts, which are not read before its end.
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=_ONLY_WHEN_FINISHED,
        )
        outputs = self._vllm.outputs(request_id, prompt_token_ids, params, lora=self._lora)
        first_s: dict[int, float] = {}
        async with aclosing(outputs):
            async for output in outputs:
                for sample in output.outputs:
                    first_s.setdefault(sample.index, time.monotonic())
                    if sample.finished():
                        done = self._completion(sample, first_s[sample.index], sampling, num_kept)
                        yield msgspec.structs.replace(done, prompt=_prompt_of(output, params))

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Score the rows with the current weights, outside the prefix cache."""
        self._require_usable()
        # Requests that run at the same time need different names.
        self._vllm.num_probes += 1
        name = f"probe-{self._vllm.num_probes}"
        scores = [self._row_logprobs(f"{name}-{i}", row) for i, row in enumerate(rows)]
        return await asyncio.gather(*scores)

    async def _row_logprobs(self, request_id: str, row: IntArray) -> FloatArray:
        request = Sample(
            request_id=request_id,
            token_ids=row,
            num_samples=1,
            max_tokens=1,
            temperature=0.0,
            policy=request_id,
            num_prompt_top=0,
        )
        scores = (await self.sample(request)).prompt_logprobs[:, 0]
        scores[0] = 0.0
        return scores

    def _completion(
        self, sample: CompletionOutput, first_s: float, sampling: Sampling, num_kept: int
    ) -> Completion:
        support = sampling.support
        if sample.finish_reason == "error" and support.grammar:
            raise DataError(
                f"xgrammar fails to compile the grammar {support.grammar[:200]!r} with the tokens"
                " of the model; simplify it"
            )
        # An aborted sample has too few tokens, and would be trained as if the policy had finished
        # it.
        if sample.finish_reason not in ("stop", "length") or sample.weight_versions is None:
            raise Unavailable(
                f"vLLM ended sample {sample.index} early ({sample.finish_reason}); the attempt"
                " of its group fails"
            )
        token_ids = np.array(sample.token_ids, np.int32)
        num_top = sampling.alternatives.num_top
        num_columns = max(num_kept, num_top)
        logprobs, kept = logprobs_of(sample.logprobs, num_columns)
        likeliest = None
        if num_top:
            table, ids = columns_of(sample.logprobs, num_columns)
            likeliest = Scores(ids=ids[:, 1 : 1 + num_top], logprobs=table[:, 1 : 1 + num_top])
        return Completion(
            index=sample.index,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=spans_of(support, len(token_ids), self._end_token_ids, kept if num_kept else ()),
            versions=self._versions(sample),
            is_truncated=int(token_ids[-1]) not in self._end_token_ids,
            first_s=first_s,
            likeliest=likeliest,
        )

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
            lora = self._vllm.directories.request(request.adapter)

        def versions(sample: CompletionOutput) -> IntArray:
            if request.policy:
                return self._versions(sample)
            return np.full(len(sample.token_ids), request.version, np.int32)

        ask = functools.partial(self._vllm.outputs, request.request_id, lora=lora)
        return await draw(request, ask, end_token_ids=self._end_token_ids, versions=versions)

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
        if self._has_spare:
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


def _prompt_of(output: RequestOutput, params: SamplingParams) -> Scores | None:
    if params.prompt_logprobs is None:
        return None
    return prompt_scores(output, len(output.prompt_token_ids or ()), params.prompt_logprobs)


def _require_whole(broken: list[str]) -> None:
    """Raise BroadcastBroken if one of the workers reports it."""
    for reason in filter(None, broken):
        raise BroadcastBroken(reason)
