"""A generator: asks for work, lets the engine write, has each sample scored at once, puts complete groups.

takes: tickets from the buffer, as many as it has room for; weights from the learner
waits for: the first weights; then admission, when it has room and the buffer gives nothing
gives: complete groups to the buffer, or the ticket back with the reason
woken by: a finished group (room), new weights (admission may open), the buffer's answer
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import AsyncGenerator

import msgspec
import numpy as np

from async_rl.data.tokenizer import load_tokenizer
from async_rl.errors import EngineDead, InfrastructureError, Unavailable, WeightsError, root_cause
from async_rl.generation.engine import Completion, Engine, build_engine, prepare_environment
from async_rl.messages import FailGroup, LoadReport, LoadWeights, Logprobs, Message, Probe, PutGroup, RequestWork, Work
from async_rl.processes.runtime import ProcessContext
from async_rl.rewards.client import VerifierClient
from async_rl.rewards.memo import VerdictMemo
from async_rl.rewards.scoring import CodeScorer
from async_rl.selection import best_of, num_drawn
from async_rl.types import NO_VERSION, DropReason, Group, IntArray, Purpose, Sampling, Ticket, Trajectory

_PARK_S = 20.0


async def run(context: ProcessContext) -> None:
    """One generator from its start to its drain."""
    prepare_environment(context.config, context.cores)
    engine = await asyncio.to_thread(build_engine, context.config, context.model_path, rank=context.rank)
    await engine.start()
    generator = Generator(context, engine)
    try:
        await context.serve({LoadWeights: generator.load_weights, Probe: generator.probe})
        await generator.work()
    finally:
        await generator.close()


class Generator:
    """One engine and the rollouts in flight on it."""

    def __init__(self, context: ProcessContext, engine: Engine) -> None:
        self._context = context
        self._config = context.config
        self._engine = engine
        self._tokenizer = load_tokenizer(context.model_path, trust_remote_code=context.config.model.trust_remote_code)
        self._client = VerifierClient(context.config, context.token)
        self._memo = VerdictMemo(self._client, size=context.config.verifiers.memo_programs)
        self._scorer = CodeScorer(context.config, self._memo)
        self._buffer = context.peer("buffer")
        self._rollouts: dict[asyncio.Task[None], Ticket] = {}
        self._has_weights = asyncio.Event()
        self._has_room = asyncio.Event()

    async def work(self) -> None:
        """Keeps the engine full until told to stop; what is in flight then goes back to the buffer."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow_verifiers(), name="follow verifiers")
            asking = group.create_task(self._ask_for_work(group), name="ask for work")
            await self._context.stopping.wait()
            for task in (following, asking, *self._rollouts):
                task.cancel()

    async def _ask_for_work(self, group: asyncio.TaskGroup) -> None:
        with self._context.activity.waiting("first weights from the learner"):
            await self._has_weights.wait()
        while True:
            while (room := self._room()) < 1:
                self._has_room.clear()
                await self._has_room.wait()
            work = await self._request_work(room)
            for ticket in work.tickets:
                task = group.create_task(self._roll_out(ticket), name=f"group {ticket.group_id}")
                self._rollouts[task] = ticket
                task.add_done_callback(self._on_rollout_done)

    def _room(self) -> int:
        """Groups that may start now, counted by the samples in flight: an evaluation's group has only one."""
        num_samples = sum(ticket.num_samples for ticket in self._rollouts.values())
        return self._config.generation.max_concurrent_groups - -(-num_samples // num_drawn(self._config.generation))

    async def _request_work(self, credit: int) -> Work:
        request = RequestWork(
            generator=self._context.name,
            incarnation=self._context.incarnation,
            version=self._engine.version,
            credit=credit,
            held=sorted(t.group_id for t in self._rollouts.values()),
            wait_s=_PARK_S,
        )
        with self._context.activity.blocked("admission: the learner is behind"):
            work: Work = await self._buffer.call(request, timeout_s=_PARK_S + self._config.supervisor.start_timeout_s)
        return work

    def _on_rollout_done(self, task: asyncio.Task[None]) -> None:
        del self._rollouts[task]
        self._has_room.set()

    async def _roll_out(self, ticket: Ticket) -> None:
        """The rollout boundary: whatever goes wrong with one group returns its ticket and is counted."""
        try:
            async with asyncio.timeout(self._config.generation.timeout_s):
                group = await self._sample_and_score(ticket)
        except TimeoutError:
            limit_s = self._config.generation.timeout_s
            await self._fail(ticket, DropReason.GENERATION_FAILED, f"not done after {limit_s:g} s (generation.timeout_s)")
        except Exception as error:  # a bad rollout is data: the group fails, is counted, its ticket returns
            cause = root_cause(error)
            if isinstance(cause, EngineDead):
                raise
            reason = DropReason.SCORING_FAILED if isinstance(cause, InfrastructureError) else DropReason.GENERATION_FAILED
            await self._fail(ticket, reason, f"{type(cause).__name__}: {cause}")
        else:
            await self._buffer.call(PutGroup(group=group), timeout_s=self._put_timeout_s)

    @property
    def _put_timeout_s(self) -> float:
        """Long enough for the buffer to die and come back."""
        return self._config.supervisor.start_timeout_s

    async def _fail(self, ticket: Ticket, reason: DropReason, message: str) -> None:
        self._context.activity.count(f"failures/{reason}", 1)
        self._context.log.warning("group %d, attempt %d: %s: %s", ticket.group_id, ticket.attempt, reason, message)
        request = FailGroup(group_id=ticket.group_id, attempt=ticket.attempt, generator=self._context.name, reason=reason, message=message)
        await self._buffer.call(request, timeout_s=self._put_timeout_s)

    async def _sample_and_score(self, ticket: Ticket) -> Group:
        started_s = time.monotonic()
        request_id = f"{ticket.group_id}.{ticket.attempt}"
        scoring: dict[int, asyncio.Task[Trajectory]] = {}
        answering: asyncio.Task[Trajectory] | None = None
        async with asyncio.TaskGroup() as group:
            if ticket.purpose is Purpose.TRAIN and self._config.algorithm.advantage == "remax":
                answering = group.create_task(self._answer_greedily(f"{request_id}.greedy", ticket), name=f"greedy answer {request_id}")
            with self._context.activity("generating"):
                async with contextlib.aclosing(self._sample(request_id, ticket, ticket.num_samples, ticket.sampling)) as completions:
                    async for done in completions:
                        self._context.activity.count("tokens_generated", len(done.token_ids))
                        scoring[done.index] = group.create_task(self._score(ticket, done), name=f"score {request_id}.{done.index}")
            generation_s = time.monotonic() - started_s
        self._context.activity.gauge("verifier/memo_share", self._memo.share)
        self._context.activity.gauge("verifier/latency_p50_s", self._client.latency_quantile_s(0.5))
        self._context.activity.gauge("verifier/latency_p99_s", self._client.latency_quantile_s(0.99))
        samples = [scoring[index].result() for index in sorted(scoring)]
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            prompt_id=ticket.prompt.prompt_id,
            purpose=ticket.purpose,
            data_source=ticket.prompt.data_source,
            generator=self._context.name,
            admitted_version=ticket.admitted_version,
            trajectories=best_of(samples, count=self._config.generation.group_size) if ticket.purpose is Purpose.TRAIN else samples,
            generation_s=generation_s,
            baseline=answering.result() if answering is not None else None,
        )

    async def _answer_greedily(self, request_id: str, ticket: Ticket) -> Trajectory:
        """ReMax's baseline: the likeliest answer, scored like any other."""
        sampling = msgspec.structs.replace(ticket.sampling, temperature=0.0)
        async with contextlib.aclosing(self._sample(request_id, ticket, 1, sampling)) as samples:
            done = await anext(samples)
        return await self._score(ticket, done)

    async def _sample(self, request_id: str, ticket: Ticket, num_samples: int, sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """The engine's completions; what only a new engine can mend is EngineDead."""
        completions = self._engine.generate(request_id, ticket.prompt.token_ids.tolist(), num_samples, sampling)
        try:
            async with contextlib.aclosing(completions):
                async for done in completions:
                    yield done
        except (Unavailable, WeightsError) as error:
            raise EngineDead(str(error)) from error

    async def _score(self, ticket: Ticket, done: Completion) -> Trajectory:
        text = self._tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
        with self._context.activity.waiting("verdicts"):
            if self._config.reward.placement == "end":
                score = await self._scorer.score(ticket.prompt, text)
            else:
                score = await self._scorer.score_steps(
                    ticket.prompt, text, num_tokens=len(done.token_ids), tokens_until=functools.partial(self._tokens_until, done.token_ids)
                )
        self._context.activity.count("samples_scored", 1)
        prompt_ids = ticket.prompt.token_ids
        num_prompt, num_new = len(prompt_ids), len(done.token_ids)
        return Trajectory(
            token_ids=np.concatenate([prompt_ids, done.token_ids]).astype(np.int32),
            prompt_length=num_prompt,
            loss_mask=np.arange(num_prompt + num_new) >= num_prompt,
            behavior_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), done.logprobs]).astype(np.float32),
            versions=np.concatenate([np.full(num_prompt, NO_VERSION, np.int32), done.versions]).astype(np.int32),
            is_truncated=done.is_truncated,
            score=score,
        )

    def _tokens_until(self, token_ids: IntArray, num_chars: int) -> int:
        """How many of the tokens write the first num_chars characters of their text."""

        def num_written(count: int) -> int:
            return len(self._tokenizer.decode(token_ids[:count], skip_special_tokens=True))

        return min(bisect.bisect_left(range(len(token_ids) + 1), num_chars, key=num_written), len(token_ids))

    async def _follow_verifiers(self) -> None:
        directory = self._context.directory
        while True:
            epoch = directory.epoch
            self._client.update_servers([m.address for m in directory.of_role("verifier")])
            await directory.changed(epoch)

    async def load_weights(self, request: LoadWeights) -> Message:
        """New weights between two engine steps; admission learns at once what this generator samples with now."""
        with self._context.activity("loading weights"):
            report: LoadReport = await self._engine.load_weights(request.manifest)
        self._context.version = self._engine.version
        self._context.activity.gauge("weights/pause_s", report.pause_s)
        self._has_weights.set()
        notice = RequestWork(
            generator=self._context.name,
            incarnation=self._context.incarnation,
            version=self._engine.version,
            credit=0,
            held=None,
            wait_s=0,
        )
        self._context.group.create_task(self._tell_version(notice), name="tell version")
        return report

    async def _tell_version(self, notice: RequestWork) -> None:
        await self._buffer.call(notice, timeout_s=self._put_timeout_s)

    async def probe(self, request: Probe) -> Message:
        """Scores the learner's probe tokens with the weights held now."""
        version = self._engine.version
        rows = await self._engine.logprobs(request.rows)
        return Logprobs(version=version if version == self._engine.version else NO_VERSION, rows=rows)

    async def close(self) -> None:
        """Ends the engine and the connections to the verifiers."""
        await self._engine.close()
        await self._memo.close()
        await self._client.close()
