"""The rollout of one group: the engine writes its samples, each is scored as soon as it ends,
together they are the group.

takes: a ticket; waits for: the engine's completions, then the verdicts; gives: the complete group,
or raises what failed Called by generator.py, which owns the engine and what becomes of a failure.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from async_rl.config.plugins import load_rollout
from async_rl.config.run import RunConfig
from async_rl.config.sampling import best_of
from async_rl.core.errors import EngineDead, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, Group, IntArray, Purpose, Sampling, Ticket, Trajectory
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.engine import Completion, Engine
from async_rl.observability.activity import Activity
from async_rl.rewards.memo import VerdictMemo
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rollouts.conversation import Conversation, RolloutEnded, Written, one_answer

_GREEDY = -1
"""Index of the greedy answer, which is no member of the group."""


def num_written(config: RunConfig, purpose: Purpose, num_samples: int) -> int:
    """Samples that the engine writes for a ticket of num_samples; ReMax adds a greedy answer in
    training, evaluation.greedy elsewhere.
    """
    return num_samples + (
        config.algorithm.advantage == "remax"
        if purpose is Purpose.TRAIN
        else config.evaluation.greedy
    )


class Surroundings(Protocol):
    """What rollouts need of the process that they are made in."""

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""

    @property
    def model_path(self) -> Path:
        """Where the model's tokenizer lies."""

    @property
    def name(self) -> str:
        """Who makes them."""

    @property
    def token(self) -> str:
        """Bearer token of the verifiers."""

    @property
    def activity(self) -> Activity:
        """Where time and counts are told."""


class Rollouts:
    """Makes groups with one engine and the verifiers there are."""

    def __init__(self, context: Surroundings, engine: Engine) -> None:
        self._context = context
        self._config = context.config
        self._engine = engine
        self._tokenizer = load_tokenizer(context.config, context.model_path)
        self._lead = load_rollout(context.config.rollout)
        self._client = VerifierClient(context.config, context.token, context.activity)
        self._memo = VerdictMemo(self._client, size=context.config.verifiers.memo_programs)
        self._scorer = Scorer(context.config, self._memo, self._client.ask_functions)

    def update_verifiers(self, urls: Sequence[str]) -> None:
        """The verifiers there are now."""
        self._client.update_servers(urls)

    async def close(self) -> None:
        """Ends the judgements under way and the connections to the verifiers."""
        await self._memo.close()
        await self._client.close()

    async def group(self, ticket: Ticket, *, written: Callable[[], None]) -> Group:
        """The complete group of a ticket; `written` is called once nothing of it is left for the
        engine. Raises what its parts raise.
        """
        started_s = time.monotonic()
        scoring: dict[int, asyncio.Task[Trajectory]] = {}

        async with asyncio.TaskGroup() as group:

            def finished(index: int, done: Written) -> None:
                self._context.activity.count("tokens_generated", int(done.is_written.sum()))
                scoring[index] = group.create_task(
                    self._score(ticket, done),
                    name=f"score {ticket.group_id}.{ticket.attempt}.{index}",
                )

            with self._context.activity("generating"):
                async with asyncio.TaskGroup() as writing:
                    writing.create_task(
                        self._write(ticket, finished), name=f"write {ticket.group_id}"
                    )
                    if num_written(self._config, ticket.purpose, 0):
                        writing.create_task(
                            self._answer_greedily(ticket, finished),
                            name=f"greedy answer {ticket.group_id}",
                        )
            generation_s = time.monotonic() - started_s
            written()
        self._context.activity.gauge("verifier/memo_share", self._memo.share)
        self._context.activity.gauge("verifier/latency_p50_s", self._client.latency_quantile_s(0.5))
        self._context.activity.gauge(
            "verifier/latency_p99_s", self._client.latency_quantile_s(0.99)
        )
        greedy = scoring.pop(_GREEDY, None)
        samples = [scoring[index].result() for index in sorted(scoring)]
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            prompt_id=ticket.prompt.prompt_id,
            purpose=ticket.purpose,
            data_source=ticket.prompt.data_source,
            generator=self._context.name,
            admitted_version=ticket.admitted_version,
            trajectories=(
                best_of(samples, count=self._config.generation.group_size)
                if ticket.purpose is Purpose.TRAIN
                else samples
            ),
            generation_s=generation_s,
            baseline=None if greedy is None else greedy.result(),
        )

    async def _write(self, ticket: Ticket, finished: Callable[[int, Written], None]) -> None:
        if self._lead is not None:
            async with asyncio.TaskGroup() as group:
                for index in range(ticket.num_samples):
                    group.create_task(
                        self._converse(ticket, index, ticket.sampling, finished),
                        name=f"sample {index}",
                    )
            return
        async with contextlib.aclosing(
            self._sample(ticket, "", ticket.num_samples, ticket.sampling)
        ) as completions:
            async for done in completions:
                finished(done.index, self._one_answer(done))

    async def _answer_greedily(
        self, ticket: Ticket, finished: Callable[[int, Written], None]
    ) -> None:
        """ReMax's baseline, and the greedy part of an evaluation: the likeliest answer, scored like
        any other.
        """
        sampling = msgspec.structs.replace(ticket.sampling, temperature=0.0)
        if self._lead is not None:
            await self._converse(ticket, _GREEDY, sampling, finished)
            return
        async with contextlib.aclosing(self._sample(ticket, ".greedy", 1, sampling)) as samples:
            finished(_GREEDY, self._one_answer(await anext(samples)))

    def _one_answer(self, done: Completion) -> Written:
        return one_answer(
            done, self._tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
        )

    async def _converse(
        self,
        ticket: Ticket,
        index: int,
        sampling: Sampling,
        finished: Callable[[int, Written], None],
    ) -> None:
        """One sample, led by the user's function until it returns or nothing fits any more."""
        assert self._lead is not None

        async def write(token_ids: Sequence[int], turn: int, sampling: Sampling) -> Completion:
            asked = self._sample(ticket, f".{index}.{turn}", 1, sampling, token_ids)
            async with contextlib.aclosing(asked) as completions:
                return await anext(completions)

        max_turns = self._config.rollout.max_turns
        talk = Conversation(
            ticket.prompt,
            sampling,
            max_turns=max_turns,
            write=write,
            tokenizer=self._tokenizer,
            client=self._client,
        )
        answer = None
        with contextlib.suppress(RolloutEnded):
            answer = await self._lead(talk)
        finished(index, talk.result(answer))

    async def _sample(
        self,
        ticket: Ticket,
        suffix: str,
        num_samples: int,
        sampling: Sampling,
        token_ids: Sequence[int] | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """The engine's completions; what only a new engine can mend is EngineDead."""
        request_id = f"{ticket.group_id}.{ticket.attempt}{suffix}"
        completions = self._engine.generate(
            request_id, token_ids or ticket.prompt.token_ids.tolist(), num_samples, sampling
        )
        try:
            async with contextlib.aclosing(completions):
                async for done in completions:
                    yield done
        except (Unavailable, WeightsError) as error:
            raise EngineDead(str(error)) from error

    async def _score(self, ticket: Ticket, done: Written) -> Trajectory:
        text = done.answer
        with self._context.activity.waiting("verdicts"):
            if self._config.reward.placement == "end":
                score = await self._scorer.score(
                    ticket.prompt, text, lambda: self._sample_of(ticket, done)
                )
            else:
                score = await self._scorer.score_steps(
                    ticket.prompt,
                    text,
                    num_tokens=len(done.token_ids),
                    tokens_until=functools.partial(self._tokens_until, done.token_ids),
                )
        self._context.activity.count("samples_scored", 1)
        prompt_ids = ticket.prompt.token_ids
        num_prompt = len(prompt_ids)
        return Trajectory(
            token_ids=np.concatenate([prompt_ids, done.token_ids]).astype(np.int32),
            prompt_length=num_prompt,
            loss_mask=np.concatenate([np.zeros(num_prompt, np.bool_), done.is_written]),
            behavior_logprobs=np.concatenate(
                [np.zeros(num_prompt, np.float32), done.logprobs]
            ).astype(np.float32),
            versions=np.concatenate(
                [np.full(num_prompt, NO_VERSION, np.int32), done.versions]
            ).astype(np.int32),
            is_truncated=done.is_truncated,
            score=score,
        )

    def _sample_of(self, ticket: Ticket, done: Written) -> RewardSample:
        """What a reward function gets of it."""
        problem = ticket.prompt.problem
        return RewardSample(
            prompt_id=ticket.prompt.prompt_id,
            prompt=ticket.prompt.text,
            response=done.answer,
            transcript=done.transcript,
            token_ids=done.token_ids.tolist(),
            is_written=done.is_written.tolist(),
            data_source=ticket.prompt.data_source,
            row=msgspec.json.decode(problem.row or "{}"),
            tests=problem.tests,
            setup=problem.setup,
            is_truncated=done.is_truncated,
            max_tokens=ticket.sampling.max_new_tokens,
        )

    def _tokens_until(self, token_ids: IntArray, num_chars: int) -> int:
        """How many of the tokens write the first num_chars characters of their text."""

        def num_written(count: int) -> int:
            return len(self._tokenizer.decode(token_ids[:count], skip_special_tokens=True))

        return min(
            bisect.bisect_left(range(len(token_ids) + 1), num_chars, key=num_written),
            len(token_ids),
        )
