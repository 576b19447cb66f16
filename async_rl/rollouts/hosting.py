"""A generator's side of other runs that share its engine: their policies are adapters next to its
own.

takes: visits, adapters, probes and rows of tokens of other runs' generators (hosted.py)
waits for: nothing
returns: what the engine returns, under the name of a policy
woken by: the other runs

Invariant: an error of another run's adapter or request is that run's; only an engine that is broken
for everybody ends this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from async_rl.core.errors import EngineDead, Unavailable, WeightsError
from async_rl.generation.engine import Engine, Guests, Hosts, require_version
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Complete, Continuation, Leave, LoadWeights, Visit
from async_rl.rollouts.sleeping import Sleeping
from async_rl.runtime.context import ProcessContext
from async_rl.wire.rpc import Handler


class Hosting:
    """The policies of other runs on one engine."""

    def __init__(self, context: ProcessContext, sleeping: Sleeping) -> None:
        self._context = context
        self._sleeping = sleeping

    def handlers(self) -> Mapping[type[Message], Handler]:
        """The messages of other runs only."""
        return {Visit: self._visit, Leave: self._leave}

    def engine(self, policy: str) -> Engine:
        """Return the engine of a policy, empty = this run's. Raises Unavailable without a slot."""
        return self._guests.find(policy) if policy else self._sleeping.engine

    @property
    def _guests(self) -> Guests:
        engine = self._sleeping.engine
        if not isinstance(engine, Hosts):
            raise Unavailable(
                f"{self._context.run_dir.name} has model.lora.slots=0, so its engines serve no"
                " other run; give model.lora.host a run with model.lora.slots=2 or more"
            )
        return engine.guests

    async def _visit(self, request: Visit) -> Message:
        self._guests.admit(request.policy)
        return Ok()

    async def _leave(self, request: Leave) -> Message:
        self._guests.release(request.policy)
        return Ok()

    async def load(self, request: LoadWeights) -> Message:
        """Load another run's adapter into its slot."""
        with self._context.activity("loading weights"):
            return await self.engine(request.policy).load_weights(request.manifest, request.source)

    async def complete(self, request: Complete) -> Message:
        """Continue a row of tokens with another run's policy."""
        engine = self.engine(request.policy)
        require_version(engine.version)
        try:
            with self._context.activity("generating"):
                completions = engine.generate(
                    request.request_id, request.token_ids.tolist(), 1, request.sampling
                )
                async with contextlib.aclosing(completions):
                    done = await anext(completions)
        except (Unavailable, WeightsError) as error:
            # This run's own groups may be at rest, and would not notice.
            self._context.group.create_task(_end(str(error)), name="engine dead")
            raise Unavailable(f"{self._context.name}: {error}") from error
        return Continuation(completed=done.completed)


async def _end(reason: str) -> None:
    raise EngineDead(reason)
