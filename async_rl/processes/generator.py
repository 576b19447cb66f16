"""A generator: an inference engine that writes groups for the buffer with the newest weights.

takes: tickets from the buffer; weights from the learner
waits for: the first weights; then tickets, which the buffer withholds while the learner is behind;
with placement=colocated, the device
returns: complete groups to the buffer, or the ticket with the reason of a failure
woken by: a written group (room for another), new weights, the buffer's answer, Drain (finish the
groups in flight, then exit), `stopping` (exit now; the buffer issues the groups again)
"""

import asyncio
import contextlib
from collections.abc import Iterator

from async_rl.config.pools import seat
from async_rl.core.errors import (
    AsyncRLError,
    EngineDead,
    Unavailable,
    WeightsError,
    require_life,
)
from async_rl.core.types import NO_VERSION
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.engine import OpenEngine, one_completion, require_version
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.generation.vllm.tool_calls import ToolCalls
from async_rl.protocol.base import Message
from async_rl.protocol.generator import (
    Complete,
    Continuation,
    Drain,
    EngineVersion,
    LoadWeights,
    Logprobs,
    Probe,
    ReadCalls,
    Sleep,
    WatchVersion,
)
from async_rl.protocol.service import LoadSlot, Sample
from async_rl.rollouts.conversation import open_conversations
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.rollout import Rollouts
from async_rl.rollouts.turns import Sleeping, Slots
from async_rl.runtime.context import ProcessContext
from async_rl.weights.files import FileReader


async def run(context: ProcessContext) -> None:
    """Bring up the engine, serve, make groups until a drain or a stop."""
    prepare_environment(context.config, context.cores)
    await context.directory.changed(-1)  # the first member list
    generator = Generator(context, await import_engine(context))
    try:
        # On a shared device the engine starts when the first push allows it.
        if not generator.is_handed_over:
            await generator.sleeping.start()
        await generator.serve()
        await generator.work()
    finally:
        await generator.close()


async def import_engine(context: ProcessContext) -> OpenEngine:
    """Import the engine, which takes most of the time."""
    rank = seat(context.config, context.name)
    return await asyncio.to_thread(engine_opener, context.config, context.model_path, rank=rank)


class Generator:
    """One engine, its weights and its groups."""

    def __init__(self, context: ProcessContext, open_engine: OpenEngine) -> None:
        self._context = context
        self._files = FileReader()
        self._learner_life = 0
        tokenizer = load_tokenizer(context.config, context.model_path)
        self._tool_calls = ToolCalls(tokenizer)
        self._rollouts = Rollouts(
            context.config,
            tokenizer=tokenizer,
            token=context.token,
            name=context.name,
            activity=context.activity,
            maker=open_conversations(context.config, tokenizer),
        )
        self.sleeping = Sleeping(open_engine, context.activity)
        self.groups = Groups(
            context,
            self._rollouts,
            engine=lambda: self.sleeping.engine,
            limit=self.sleeping.limit,
        )
        base = None if context.config.model.is_applied else context.model_path
        self._slots = Slots(self.sleeping, base)
        self.is_handed_over = context.config.takes_turns
        self._version_changed = asyncio.Event()
        self._completed = asyncio.Event()
        self._num_completing = 0

    async def serve(self) -> None:
        """Answer the learner and the supervisor from now on."""
        # A colocated engine starts with the first push, so it has no devices for a broadcast yet.
        devices = [] if self.is_handed_over else await self.sleeping.engine.weight_devices()
        await self._context.serve(
            {
                LoadWeights: self._load_weights,
                Probe: self._probe,
                Drain: self.groups.drain,
                Sleep: self.sleeping.sleep,
                Complete: self.complete,
                Sample: self.sample,
                # On a separate thread, next to the steps of the engine.
                ReadCalls: self._tool_calls.read,
                WatchVersion: self._watch_version,
                LoadSlot: self._slots.load,
            },
            devices=devices,
        )

    async def work(self) -> None:
        """Make groups until a drain or a stop."""
        owned = {"follow verifiers": self._rollouts.follow_verifiers(self._context.directory)}
        if self.is_handed_over:
            owned["start the engine"] = self.sleeping.start_when_called()
            owned["report sleep"] = self.sleeping.report()
        await self._context.work_until_stopped(self._make(), owned)

    async def close(self) -> None:
        """Close the engine and the connections to the verifiers."""
        await self.sleeping.close()
        self._files.close()
        await self._rollouts.close()

    async def _make(self) -> None:
        """Make groups until a drain; in a run with agents, wait for it and serve the gateway's."""
        if not self._context.config.agent.is_used:
            await self.groups.make()
            return
        await self.groups.draining.wait()
        while self._num_completing:
            self._completed.clear()
            await self._completed.wait()

    async def complete(self, request: Complete) -> Message:
        """Continue a row of tokens for an agent."""
        engine = self.sleeping.engine
        require_version(engine.version)
        with self._completing(EngineDead):
            done = await one_completion(
                engine, request.request_id, request.token_ids, request.sampling
            )
        self._context.activity.count("tokens_generated", len(done.token_ids))
        return Continuation(completed=done)

    async def sample(self, request: Sample) -> Message:
        """Draw sequences for a program that uses the run as a service."""
        with self._completing(Unavailable):
            sampled = await self._slots.sample(request)
        num_tokens = sum(len(sequence.token_ids) for sequence in sampled.sequences)
        self._context.activity.count("tokens_generated", num_tokens)
        return sampled

    @contextlib.contextmanager
    def _completing(self, failure: type[AsyncRLError]) -> Iterator[None]:
        """Count a call, which a drain waits for. A call that the engine fails ends this process,
        and raises `failure`.
        """
        self._num_completing += 1
        try:
            with self._context.activity("generating"):
                yield
        except (Unavailable, WeightsError) as error:
            # Another engine may continue the row. No group of this run may be in flight, so nothing
            # else would show that the engine is dead.
            self._context.group.create_task(_end(str(error)), name="engine dead")
            if isinstance(error, WeightsError) or self._context.stopping.is_set():
                failure = Unavailable
            raise failure(f"{self._context.name}: {error}") from error
        finally:
            self._num_completing -= 1
            self._completed.set()

    async def _watch_version(self, request: WatchVersion) -> Message:
        try:
            async with asyncio.timeout(request.wait_s):
                while self._weights() == request.known:
                    await self._version_changed.wait()
        except TimeoutError:
            pass
        return self._weights()

    def _weights(self) -> EngineVersion:
        return EngineVersion(version=self._context.version, life=self._context.life)

    async def _load_weights(self, request: LoadWeights) -> Message:
        """Load new weights between two engine steps, which wakes the engine."""
        life = request.manifest.life
        require_life(life, self._learner_life)
        self._learner_life = life
        async with self.sleeping.waking(request.handover) as engine:
            with self._context.activity("loading weights"):
                manifest = request.manifest
                source = request.source
                # An engine that applies an adapter takes the file itself.
                if not self._context.config.model.is_applied:
                    manifest, source = await asyncio.to_thread(
                        self._files.localize, manifest, source
                    )
                report = await engine.load_weights(manifest, source)
        self._context.version = report.version
        self._context.life = life
        self._context.activity.gauge("weights/pause_s", report.pause_s)
        # The waiters of the old event wake; the new one is for the next version.
        self._version_changed.set()
        self._version_changed = asyncio.Event()
        if self._context.config.agent.is_used:
            return report
        self.groups.weights_loaded()
        # Admission may open with the new version; the push does not wait for the buffer.
        self._context.group.create_task(self.groups.report_version(), name="report version")
        return report

    async def _probe(self, request: Probe) -> Message:
        """Score the learner's probe tokens with the current weights."""
        engine = self.sleeping.engine
        version = engine.version
        rows = await engine.logprobs(request.rows)
        if version != engine.version:
            version = NO_VERSION  # a load came in between, so the rows belong to no version
        return Logprobs(version=version, rows=rows)


async def _end(reason: str) -> None:
    raise EngineDead(reason)
