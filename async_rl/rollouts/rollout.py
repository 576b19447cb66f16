"""The rollout of one group: the engine writes its samples, and each is scored as soon as it ends.

takes: a ticket
waits for: the engine's completions, then the verdicts
returns: the complete group, or the exception of its first failure
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import field
from typing import Any

import msgspec

from async_rl.config.plugins import load_rollout
from async_rl.config.run import RunConfig
from async_rl.config.sampling import best_of
from async_rl.core.errors import (
    BrokenTest,
    EngineDead,
    InfrastructureError,
    RewardError,
    Unavailable,
    WeightsError,
)
from async_rl.core.frozen import frozen
from async_rl.core.types import Group, IntArray, Purpose, Sampling, Ticket, Trajectory
from async_rl.generation.engine import Completion, Generates
from async_rl.observability.activity import Activity
from async_rl.rewards.memo import VerdictMemo
from async_rl.rewards.scoring import Control, Scorer
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.conversation import Conversation, RolloutEnded, Written, one_answer
from async_rl.rollouts.samples import num_written, reward_sample, trajectory

_SCORING_FAILURES = (RewardError, InfrastructureError)
_GREEDY = -1
"""Index of the greedy answer, which is not a member of the group."""


@frozen
class _Samples:
    """Samples of one ticket on their way to their scores, by index. started_s: monotonic."""

    ticket: Ticket
    started_s: float
    engine: Generates
    group: asyncio.TaskGroup
    scoring: dict[int, asyncio.Task[Trajectory]] = field(default_factory=dict)


_MEMO_PROGRAMS = 20_000
"""Programs whose verdicts are remembered: those of some hundred groups, in a few MB."""


class Rollouts:
    """Makes groups with an engine and the current verifiers.

    token: bearer token of the verifiers. name: the generator, for the ledger. agents: make the
    samples, in a gateway.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        tokenizer: Any,
        token: str,
        name: str,
        activity: Activity,
        agents: Agents | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._name = name
        self._activity = activity
        self._lead = load_rollout(config.rollout)
        self._agents = agents
        self._client = VerifierClient(config, token, activity)
        self._memo = VerdictMemo(self._client, size=_MEMO_PROGRAMS)
        self._scorer = Scorer(config, self._memo, self._client.ask_functions)
        without_memo = Scorer(config, self._client, self._client.ask_functions)
        self._control = Control(without_memo, limit_s=config.timeouts.call_s)

    def update_verifiers(self, urls: Sequence[str]) -> None:
        """Use these verifiers from now on."""
        self._client.update_servers(urls)

    async def close(self) -> None:
        """Cancel running requests and close the connections to the verifiers."""
        await self._control.close()
        await self._scorer.close()
        await self._memo.close()
        await self._client.close()

    def forget(self, ticket: Ticket) -> None:
        """The attempt has failed, or its group is with the buffer."""
        if self._agents is not None:
            self._agents.forget(ticket)

    async def is_outage(self, failure: BaseException) -> bool:
        """Return whether scoring failed for a reason that has nothing to do with the sample."""
        if isinstance(failure, BrokenTest) or not isinstance(failure, _SCORING_FAILURES):
            return False
        return await self._control.is_outage()

    async def group(
        self, ticket: Ticket, engine: Generates, *, written: Callable[[], None]
    ) -> Group:
        """Return the complete group of a ticket. Raises the exceptions of its parts.

        written: called once the engine has written all samples, while some still wait for scores.
        """
        started_s, started_unix_s = time.monotonic(), time.time()
        async with asyncio.TaskGroup() as tasks:
            samples = _Samples(ticket=ticket, started_s=started_s, engine=engine, group=tasks)
            with self._activity("generating"):
                # A nested task group: it ends with the writing, while scores are pending.
                async with asyncio.TaskGroup() as writing:
                    writing.create_task(self._write(samples), name=f"write {ticket.group_id}")
                    if num_written(self._config, ticket.purpose, 0):
                        writing.create_task(
                            self._answer_greedily(samples), name=f"greedy {ticket.group_id}"
                        )
            generation_s = time.monotonic() - started_s
            written()
        self._activity.gauge("verifier/memo_share", self._memo.share)
        self._activity.gauge("verifier/latency_p50_s", self._client.latency_quantile_s(0.5))
        self._activity.gauge("verifier/latency_p99_s", self._client.latency_quantile_s(0.99))
        # The group keeps the order of the engine, not the order in which scores arrived.
        greedy = samples.scoring.pop(_GREEDY, None)
        trajectories = [samples.scoring[index].result() for index in sorted(samples.scoring)]
        if ticket.purpose is Purpose.TRAIN:
            # Only training keeps the best: an evaluation must measure all that were drawn.
            trajectories = best_of(trajectories, count=self._config.generation.group_size)
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            prompt_id=ticket.prompt.prompt_id,
            purpose=ticket.purpose,
            data_source=ticket.prompt.data_source,
            generator=self._name,
            admitted_version=ticket.admitted_version,
            trajectories=trajectories,
            generation_s=generation_s,
            baseline=None if greedy is None else greedy.result(),
            started_s=started_unix_s,
        )

    async def _write(self, samples: _Samples) -> None:
        ticket = samples.ticket
        if self._lead is not None or self._agents is not None:
            async with asyncio.TaskGroup() as group:
                for index in range(ticket.num_samples):
                    talk = self._converse(samples, index, ticket.sampling)
                    group.create_task(talk, name=f"sample {index}")
            return
        # One request for all samples, so that they share one prefill.
        completions = self._complete(samples, "", ticket.num_samples, ticket.sampling)
        async with contextlib.aclosing(completions):
            async for done in completions:
                self._score_later(samples, done.index, self._one_answer(done))

    async def _answer_greedily(self, samples: _Samples) -> None:
        """Write the likeliest answer, which is scored like any other.

        It is ReMax's baseline, and the greedy part of an evaluation.
        """
        ticket = samples.ticket
        # Greedy: the baseline of ReMax is the reward of the likeliest answer.
        sampling = msgspec.structs.replace(ticket.sampling, temperature=0.0)
        if self._lead is not None or self._agents is not None:
            await self._converse(samples, _GREEDY, sampling)
            return
        done = await self._complete_one(samples, ".greedy", sampling)
        self._score_later(samples, _GREEDY, self._one_answer(done))

    def _one_answer(self, done: Completion) -> Written:
        text = self._tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
        return one_answer(done, text)

    async def _converse(self, samples: _Samples, index: int, sampling: Sampling) -> None:
        """Let the user's function or agent lead one sample until it returns or no further turn
        fits.
        """
        if self._agents is not None:
            done = await self._agents.sample(
                samples.ticket, index, sampling, samples.engine, self._client
            )
            self._score_later(samples, index, done)
            return
        assert self._lead is not None, "only called with rollout.fn"
        ticket = samples.ticket

        async def write(token_ids: Sequence[int], turn: int, sampling: Sampling) -> Completion:
            return await self._complete_one(samples, f".{index}.{turn}", sampling, token_ids)

        talk = Conversation(
            ticket.prompt,
            sampling,
            max_turns=self._config.rollout.max_turns,
            write=write,
            tokenizer=self._tokenizer,
            client=self._client,
        )
        answer = None
        with contextlib.suppress(RolloutEnded):
            answer = await self._lead(talk)
        self._score_later(samples, index, talk.result(answer))

    async def _complete_one(
        self,
        samples: _Samples,
        suffix: str,
        sampling: Sampling,
        token_ids: Sequence[int] | None = None,
    ) -> Completion:
        completions = self._complete(samples, suffix, 1, sampling, token_ids)
        async with contextlib.aclosing(completions):
            return await anext(completions)

    async def _complete(
        self,
        samples: _Samples,
        suffix: str,
        num_samples: int,
        sampling: Sampling,
        token_ids: Sequence[int] | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Yield the engine's completions. Raises EngineDead where only a new engine helps."""
        ticket = samples.ticket
        request_id = f"{ticket.group_id}.{ticket.attempt}{suffix}"
        prompt = token_ids or ticket.prompt.token_ids.tolist()
        completions = samples.engine.generate(request_id, prompt, num_samples, sampling)
        try:
            async with contextlib.aclosing(completions):
                async for done in completions:
                    yield done
        # Neither is the fault of this group: no other group would succeed on this engine.
        except (Unavailable, WeightsError) as error:
            raise EngineDead(str(error)) from error

    def _score_later(self, samples: _Samples, index: int, done: Written) -> None:
        # The generators of a gateway count what they write themselves.
        if self._agents is None:
            self._activity.count("tokens_generated", int(done.is_written.sum()))
        ticket = samples.ticket
        samples.scoring[index] = samples.group.create_task(
            self._score(samples, done), name=f"score {ticket.group_id}.{ticket.attempt}.{index}"
        )

    async def _score(self, samples: _Samples, done: Written) -> Trajectory:
        ticket, written_s = samples.ticket, time.monotonic()
        asked = functools.partial(reward_sample, ticket, done)
        with self._activity.waiting("verdicts"):
            if done.score is not None:
                score = done.score
            elif self._config.reward.placement == "end":
                score = await self._scorer.score(ticket.prompt, done.answer, asked)
            else:
                score = await self._scorer.score_steps(
                    ticket.prompt,
                    done.answer,
                    num_tokens=len(done.token_ids),
                    tokens_until=functools.partial(self._tokens_until, done.token_ids),
                    sample=asked,
                )
        if done.score is None:
            self._control.remember(ticket.prompt, done.answer, asked)
        self._activity.count("samples_scored", 1)
        clock: tuple[float, ...] = ()
        if self._config.recording != "off":
            moments = (done.first_s, written_s, time.monotonic())
            clock = tuple(moment - samples.started_s for moment in moments)
        return trajectory(ticket.prompt, done, score, clock=clock)

    def _tokens_until(self, token_ids: IntArray, num_chars: int) -> int:
        """Return the number of leading tokens whose text has the first `num_chars` characters."""

        def num_chars_of(count: int) -> int:
            return len(self._tokenizer.decode(token_ids[:count], skip_special_tokens=True))

        counts = range(len(token_ids) + 1)
        # A score may name a position beyond the text; the last token stands for it.
        return min(bisect.bisect_left(counts, num_chars, key=num_chars_of), len(token_ids))
