"""An AsyncLLM with its state, which several policies may share.

Invariant: an LLM whose load failed half-way is dirty: all requests in flight fail, and it refuses
further work.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from async_rl.core.errors import (
    AsyncRLError,
    BroadcastBroken,
    DataError,
    Unavailable,
    WeightsError,
)
from async_rl.generation.vllm.core import ThreadedCore
from async_rl.generation.vllm.sampling import REFUSALS

_LOST_WORKER = "failed: cancelled"
"""The end of vLLM's message for a call that was waiting when a worker process exited."""


class Versioned(Protocol):
    """A policy on an LLM. version: of its current weights."""

    version: int


class Llm:
    """An AsyncLLM with its state.

    policies: several in a service (adapters.py); the label of its weights has
    the version of each. core: its client of the engine's core; thread: the same where the core is a
    thread of this process, else None. has_spare: the worker stages weights in a second copy of the
    model. loading: held by the one load that is under way.
    """

    def __init__(self, llm: AsyncLLM, *, has_spare: bool = False) -> None:
        self.llm = llm
        self.has_spare = has_spare
        self.core = llm.engine_core
        self.thread = self.core if isinstance(self.core, ThreadedCore) else None
        self.loading = asyncio.Lock()
        self.policies: list[Versioned] = []
        self.num_probes = 0
        self._dirty = ""
        self._is_closed = False

    async def close(self) -> None:
        """End the engine. Safe to call twice."""
        self._is_closed = True
        await asyncio.to_thread(self.llm.shutdown)

    async def outputs(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        lora: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield vLLM's outputs of one request; leaving it aborts the request. Raises DataError for
        a request that vLLM refuses, Unavailable if the engine died.
        """
        prompt = tokens_input(list(token_ids))
        try:
            generator = self.llm.generate(prompt, params, request_id, lora_request=lora)
            async with aclosing(generator) as outputs:
                async for output in outputs:
                    yield output
        except REFUSALS as error:
            raise DataError(f"vLLM refuses the request: {error}") from error
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error.__cause__, AsyncRLError):
                raise error.__cause__ from error
            cause = error.__cause__ or error
            raise Unavailable(
                f"the vLLM engine died under request {request_id}: {cause}; start the generator"
                " again"
            ) from error

    async def beside(self, method: str, *args: object) -> list[Any]:
        """Call a method of the workers next to the engine's steps, or between two steps if the core
        is in another process. An error concerns the caller only.
        """
        if self.thread is not None:
            return await self.thread.beside_async(method, *args)
        results: list[Any] = await self.llm.collective_rpc(method, args=args)
        return results

    def require_clean(self) -> None:
        """Raise Unavailable or WeightsError if it must not be used any more."""
        if self._is_closed:
            raise Unavailable("the vLLM engine is closed; start the generator again")
        if self._dirty:
            raise WeightsError(f"{self._dirty}; start the generator again")

    @contextmanager
    def dirty_on_error(self, version: int) -> Iterator[None]:
        """Mark the engine as dirty if a change of weights stops early.

        A broken broadcast leaves it paused instead, and the load is repeated.
        """
        try:
            yield
        except BroadcastBroken:
            raise
        except BaseException as error:
            root = error.__cause__ or error
            reason = f"{type(root).__name__}: {root}"
            if str(root).endswith(_LOST_WORKER):
                reason = "a worker process of the engine exited, see the log above"
            self._dirty = f"loading version {version} failed half-way ({reason})"
            failure = WeightsError(f"{self._dirty}; start the generator again")
            self.llm.output_processor.propagate_error(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
