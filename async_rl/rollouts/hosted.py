"""The engine of a run with model.lora.host: a slot on a generator of another run (hosting.py).

Invariant: the engine stays with one life of one generator. Once that process exits or forgets the
policy, the engine is dead. The next life of this process takes another slot, and the learner pushes
to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.config.pools import seat
from async_rl.core.errors import AsyncRLError, ConfigError, Unavailable
from async_rl.core.os import exit_of
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.generation.engine import require_version
from async_rl.protocol.base import Message
from async_rl.protocol.generator import (
    Complete,
    Completion,
    Continuation,
    Leave,
    LoadReport,
    LoadWeights,
    Logprobs,
    Probe,
    Visit,
)
from async_rl.protocol.membership import DRAINING, Member
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source
from async_rl.runtime.context import ProcessContext, connect_control, require_running
from async_rl.runtime.directory import Connections, Directory, Incarnation, SupervisorCalls
from async_rl.wire.keys import load_keys

# Three visits fit into the time after which a supervisor forgets a guest (60 s), and four into
# hosting.py's _GONE_S (90 s).
_VISIT_S = 20.0
# A process that is stopped has about five seconds; two farewells must fit.
_LEAVE_S = 2.0


async def open_hosted(context: ProcessContext) -> HostedEngine:
    """Take a slot on a generator of the host."""
    engine = HostedEngine(context)
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return engine


class HostedEngine:
    """One policy on another run's generator, as an `Engine`."""

    def __init__(self, context: ProcessContext) -> None:
        adapter = context.config.model.adapter
        assert adapter is not None
        assert adapter.host is not None
        self._context = context
        self._host = Path(adapter.host)
        self._name = f"{context.run_dir.name}/{context.name}"
        self._policy = f"{self._name}/{context.incarnation}"
        self._timeouts = context.config.timeouts
        self._stack = contextlib.AsyncExitStack()
        self._life: Incarnation | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._num_requests = 0
        self.version = NO_VERSION
        """Version of the current weights."""

    async def open(self) -> None:
        """Take a slot of one of the host's generators, once one serves.

        Raises Unavailable if the host does not run or all slots are taken.
        """
        enter = self._stack.enter_async_context
        client = await enter(connect_control(self._host))
        directory = Directory()
        connections = Connections(load_keys(self._host / "keys"), directory)
        self._stack.push_async_callback(connections.close)
        supervisor = SupervisorCalls(client, patience_s=self._timeouts.orphan_s)
        remedy = "continue it with async-rl resume, then this one"
        following = directory.follow(
            supervisor, frozenset({"generator"}), call_timeout_s=self._timeouts.call_s
        )
        await enter(self._background(following, remedy))
        await enter(self._background(self._watch_host(), remedy))
        await enter(self._visiting(supervisor, self._name, remedy))
        while self._life is None:
            revision = directory.revision
            refusal: AsyncRLError | None = None
            for member in self._members(directory):
                life = Incarnation(member, directory, connections)
                try:
                    await self._unless_ended(self._visit(life, self._policy))
                except Unavailable as error:
                    refusal = error
                    continue
                self._life = life
                await enter(self._visiting(life, self._policy, "this generator starts again"))
                return
            if refusal is not None and directory.revision == revision:
                raise refusal
            with self._context.activity.waiting(f"a generator of run {self._host.name}"):
                await self._unless_ended(directory.changed(revision))

    def _members(self, directory: Directory) -> list[Member]:
        """The host's generators, rotated so that each generator of this run tries another first."""
        serving = [m for m in directory.of_role("generator") if m.state != DRAINING]
        first = seat(self._context.config, self._context.name) % max(1, len(serving))
        return serving[first:] + serving[:first]

    @contextlib.asynccontextmanager
    async def _background(
        self, work: Coroutine[Any, Any, None], remedy: str
    ) -> AsyncIterator[None]:
        """Do the work during the block; its first error stops the engine."""

        def end(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, AsyncRLError) and not self._ended.done():
                self._ended.set_result(f"{error}; {remedy}")

        task = asyncio.create_task(work, name="host")
        task.add_done_callback(end)
        try:
            yield
        finally:
            await _cancel([task])

    @contextlib.asynccontextmanager
    async def _visiting(
        self, host: SupervisorCalls | Incarnation, name: str, remedy: str
    ) -> AsyncIterator[None]:
        """Give signs of life during the block, then leave."""
        # Left before the farewell: a visit after that would take the slot again.
        async with self._background(self._keep_visiting(host, name), remedy):
            yield
        # A process that exits for another reason than a stop starts again, and the supervisor of
        # the host has to wait for it; its slot is free in any case.
        if name == self._policy or self._context.stopping.is_set():
            # A host that has exited has no slots.
            with contextlib.suppress(AsyncRLError):
                leaving = host.call(Leave(policy=name), timeout_s=_LEAVE_S)
                await self._unless_ended(leaving)

    async def _watch_host(self) -> None:
        """Raise Unavailable once the supervisor of the host has exited."""
        control = require_running(self._host)
        # On another machine the deadline of a visit shows that the supervisor has exited.
        if control.machine == platform.node():
            await exit_of(control.pid)
            require_running(self._host)

    async def _keep_visiting(self, host: SupervisorCalls | Incarnation, name: str) -> None:
        """Give a sign of life every _VISIT_S seconds, until cancelled."""
        while True:
            await self._visit(host, name)
            await asyncio.sleep(_VISIT_S)

    async def _visit(self, host: SupervisorCalls | Incarnation, name: str) -> None:
        await host.call(Visit(policy=name), timeout_s=self._timeouts.call_s)

    async def _unless_ended(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of the work. Raises Unavailable once the host is lost."""
        task = asyncio.create_task(work, name="call of the host")
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable(
                    f"run {self._host.name} (model.lora.host) no longer serves this one:"
                    f" {self._ended.result()}"
                )
            return task.result()
        finally:
            await _cancel([task])

    async def _call(self, request: Message, timeout_s: float) -> Any:
        if self._life is None:
            raise Unavailable("this engine has no slot yet; open it first")
        return await self._unless_ended(self._life.call(request, timeout_s=timeout_s))

    async def close(self) -> None:
        """Leave the slot and close the connections."""
        await self._stack.aclose()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion as it finishes. Each sample is a separate call; the calls read one
        prefill through the host's prefix cache.
        """
        require_version(self.version)
        # Requests of an earlier life or of a repeated attempt may still be on the host.
        self._num_requests += 1
        name = f"{self._policy}/{self._num_requests}.{request_id}"
        token_ids = np.array(prompt_token_ids, np.int32)
        calls = [
            asyncio.create_task(self._sample(f"{name}.{index}", index, token_ids, sampling))
            for index in range(num_samples)
        ]
        try:
            for done in asyncio.as_completed(calls):
                yield await done
        finally:
            await _cancel(calls)

    async def _sample(
        self, name: str, index: int, token_ids: IntArray, sampling: Sampling
    ) -> Completion:
        request = Complete(
            request_id=name, token_ids=token_ids, sampling=sampling, policy=self._policy
        )
        # The time limit of the group expires before this deadline.
        limit_s = self._timeouts.longest_group_s(self._context.config.data.max_response_tokens)
        reply: Continuation = await self._call(request, limit_s)
        # The host may be another machine, whose clock says nothing here.
        return msgspec.structs.replace(reply.completed, index=index, first_s=math.nan)

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Let the host's engine load the adapter between two of its steps."""
        request = LoadWeights(manifest=manifest, source=source, policy=self._policy)
        report: LoadReport = await self._call(request, self._timeouts.push_s)
        self.version = report.version
        return report

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Score the rows with this policy's current weights."""
        require_version(self.version)
        request = Probe(rows=list(rows), policy=self._policy)
        reply: Logprobs = await self._call(request, self._timeouts.push_s)
        return reply.rows

    async def sleep(self) -> None:
        """Raise ConfigError: the device is another run's."""
        raise ConfigError("model.lora.host with placement=colocated; set placement=disaggregated")

    async def weight_devices(self) -> list[str]:
        """Return no device: an adapter comes as a file only."""
        return []


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
