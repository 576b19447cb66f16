"""The rollout of one group: its samples are written, and each is scored as soon as it is complete.

takes: a ticket
waits for: the engine's completions, then the verdicts
returns: the complete group, or the exception of its first failure
"""

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import field
from typing import Any

import msgspec
import numpy as np

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
from async_rl.core.types import (
    Group,
    IntArray,
    Prompt,
    Purpose,
    Sampling,
    Score,
    Ticket,
    Trajectory,
)
from async_rl.generation.engine import Generates, one_completion
from async_rl.observability.activity import Activity
from async_rl.protocol.generator import Completion, joined, only_read
from async_rl.rewards.memo import VerdictMemo
from async_rl.rewards.scoring import Control, Scorer, VerifierClient
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rollouts.conversation import SampleMaker, Written
from async_rl.runtime.directory import Directory

_SCORING_FAILURES = (RewardError, InfrastructureError)
_GREEDY = -1
"""Index of the greedy answer, which is not a member of the group: its reward is the baseline of
ReMax, or the greedy figure of an evaluation.
"""
_MEMO_PROGRAMS = 20_000
"""Programs whose verdicts are remembered: the programs of some hundred groups, in a few MB."""


@frozen
class _Samples:
    """Samples of one ticket on their way to their scores, by index. started_s: monotonic."""

    ticket: Ticket
    started_s: float
    engine: Generates
    group: asyncio.TaskGroup
    scoring: dict[int, asyncio.Task[Trajectory]] = field(default_factory=dict)


class Rollouts:
    """Makes groups with an engine and the current verifiers.

    token: of the verifiers. name: the generator, for the ledger. maker: None = one answer each.
    client: calls the verifiers.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        tokenizer: Any,
        token: str,
        name: str,
        activity: Activity,
        maker: SampleMaker | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._name = name
        self._activity = activity
        self._maker = maker
        self.client = VerifierClient(config, token, activity)
        self._memo = VerdictMemo(self.client, size=_MEMO_PROGRAMS)
        self.scorer = Scorer(config, self._memo, self.client.ask_functions)
        # A remembered verdict would not show whether verifiers answer now.
        without_memo = Scorer(config, self.client, self.client.ask_functions)
        self.control = Control(without_memo, limit_s=config.timeouts.call_s)

    async def follow_verifiers(self, directory: Directory) -> None:
        """Use the verifiers of the directory, until cancelled."""
        while True:
            revision = directory.revision
            self.client.update_servers([m.address for m in directory.of_role("verifier")])
            await directory.changed(revision)

    async def close(self) -> None:
        """Cancel running requests and close the connections to the verifiers."""
        await self._memo.close()
        await self.client.close()

    async def is_outage(self, failure: BaseException) -> bool:
        """Return whether scoring failed for a reason that has nothing to do with the sample."""
        if isinstance(failure, BrokenTest) or not isinstance(failure, _SCORING_FAILURES):
            return False
        return await self.control.is_outage()

    async def group(
        self, ticket: Ticket, engine: Generates, *, written: Callable[[], None]
    ) -> Group:
        """Return the complete group of a ticket. Raises the exceptions of its parts.

        written: called once the engine has written all samples, while some still wait for scores.
        """
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            samples = _Samples(ticket=ticket, started_s=started_s, engine=engine, group=tasks)
            with self._activity("generating"):
                # A nested task group: it is left after the writing, while scores are pending.
                async with asyncio.TaskGroup() as writing:
                    for work in self._work(samples):
                        writing.create_task(work, name=f"write {ticket.group_id}")
            generation_s = time.monotonic() - started_s
            written()
        self._activity.gauge("verifier/memo_share", self._memo.share)
        self._activity.gauge("verifier/latency_p50_s", self.client.latency_quantile_s(0.5))
        self._activity.gauge("verifier/latency_p99_s", self.client.latency_quantile_s(0.99))
        # The group keeps the order of the engine, not the order of the scores' arrival.
        baseline = samples.scoring.pop(_GREEDY, None)
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
            baseline=None if baseline is None else baseline.result(),
        )

    def _work(self, samples: _Samples) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the tasks that write the samples."""
        ticket = samples.ticket
        wanted: list[tuple[Sequence[int], Sampling]] = [
            (range(ticket.num_samples), ticket.sampling)
        ]
        if num_written(self._config, ticket.purpose, 0):
            # The likeliest answer, which is scored like any other.
            greedy = msgspec.structs.replace(ticket.sampling, temperature=0.0)
            wanted.append(([_GREEDY], greedy))
        for indices, sampling in wanted:
            if self._maker is None:
                # One request for all samples, so that they share one prefill.
                yield self._write(samples, indices, sampling)
            else:
                yield from (self._make(samples, self._maker, i, sampling) for i in indices)

    async def _write(self, samples: _Samples, indices: Sequence[int], sampling: Sampling) -> None:
        """Write samples of one answer each."""
        ticket = samples.ticket
        completions = samples.engine.generate(
            f"{ticket.group_id}.{ticket.attempt}.{indices[0]}",
            ticket.prompt.token_ids.tolist(),
            len(indices),
            sampling,
        )
        with _engine_dead_on_error():
            async with contextlib.aclosing(completions):
                async for done in completions:
                    ids = done.token_ids.tolist()
                    text = self._tokenizer.decode(ids, skip_special_tokens=True)
                    sample = Written(tokens=done, answer=text, transcript=text)
                    self._score_later(samples, indices[done.index], sample)

    async def _make(
        self, samples: _Samples, maker: SampleMaker, index: int, sampling: Sampling
    ) -> None:
        """Make one sample with the user's function or agent."""

        async def write(request_id: str, token_ids: IntArray, sampling: Sampling) -> Completion:
            with _engine_dead_on_error():
                return await one_completion(samples.engine, request_id, token_ids, sampling)

        done = await maker(samples.ticket, index, sampling, write, self.client)
        self._score_later(samples, index, done)

    def _score_later(self, samples: _Samples, index: int, done: Written) -> None:
        # The generators that serve a gateway count the tokens that they write for it.
        if not self._config.agent.is_used:
            self._activity.count("tokens_generated", int(done.tokens.is_written.sum()))
        ticket = samples.ticket
        samples.scoring[index] = samples.group.create_task(
            self._score(samples, done), name=f"score {ticket.group_id}.{ticket.attempt}.{index}"
        )

    async def _score(self, samples: _Samples, done: Written) -> Trajectory:
        ticket = samples.ticket
        written_s = time.monotonic()
        asked = functools.partial(reward_sample, ticket, done)
        with self._activity.waiting("verdicts"):
            if done.score is not None:
                score = done.score
            elif self._config.reward.placement == "end":
                score = await self.scorer.score(ticket.prompt, done.answer, asked)
            else:
                score = await self.scorer.score_steps(
                    ticket.prompt,
                    done.answer,
                    num_tokens=len(done.tokens.token_ids),
                    tokens_until=functools.partial(self._tokens_until, done.tokens.token_ids),
                    sample=asked,
                )
        # Only a sample that the verifiers have scored can show later that they work.
        if done.score is None:
            self.control.remember(ticket.prompt, done.answer, asked)
            given = sum(call.reward for call in done.calls)
            score = msgspec.structs.replace(score, reward=score.reward + given)
        self._activity.count("samples_scored", 1)
        clock: tuple[float, ...] = ()
        if self._config.recording != "off":
            moments = (done.tokens.first_s, written_s, time.monotonic())
            clock = tuple(moment - samples.started_s for moment in moments)
        return trajectory(ticket.prompt, done, score, clock=clock)

    def _tokens_until(self, token_ids: IntArray, num_chars: int) -> int:
        """Return the number of leading tokens whose text has the first `num_chars` characters."""

        def num_chars_of(count: int) -> int:
            return len(self._tokenizer.decode(token_ids[:count], skip_special_tokens=True))

        counts = range(len(token_ids) + 1)
        # A score may name a position beyond the text; the last token stands for it.
        return min(bisect.bisect_left(counts, num_chars, key=num_chars_of), len(token_ids))


@contextlib.contextmanager
def _engine_dead_on_error() -> Iterator[None]:
    """Raise EngineDead for an error that the engine would raise for every other group too."""
    try:
        yield
    except (Unavailable, WeightsError) as error:
        raise EngineDead(str(error)) from error


def num_written(config: RunConfig, purpose: Purpose, num_samples: int) -> int:
    """Return the samples that the engine writes for a ticket of `num_samples`.

    ReMax adds a greedy answer in training. In evaluation several samples have one next to them,
    which costs little then and shows how much sampling loses.
    """
    if purpose is Purpose.TRAIN:
        has_greedy = config.algorithm.advantage.kind == "remax"
    else:
        has_greedy = config.evaluation.num_samples > 1
    return num_samples + has_greedy


def trajectory(
    prompt: Prompt, done: Written, score: Score, *, clock: tuple[float, ...] = ()
) -> Trajectory:
    """Return the sample after its prompt; the tokens of the prompt are not trained."""
    num_prompt = len(prompt.token_ids)
    whole = joined([only_read(prompt.token_ids), done.tokens])
    return Trajectory(
        # An engine of a plug-in may return other number types.
        token_ids=whole.token_ids.astype(np.int32),
        prompt_length=num_prompt,
        loss_mask=whole.is_written,
        behavior_logprobs=whole.logprobs.astype(np.float32),
        versions=whole.versions.astype(np.int32),
        is_truncated=done.tokens.is_truncated,
        score=score,
        branches=done.branches,
        clock=clock,
        spans=whole.spans,
        calls=done.calls,
    )


def reward_sample(ticket: Ticket, done: Written) -> RewardSample:
    """Return the argument of a reward function."""
    prompt = ticket.prompt
    problem = ticket.prompt.problem
    return RewardSample(
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        response=done.answer,
        transcript=done.transcript,
        token_ids=done.tokens.token_ids.tolist(),
        is_written=done.tokens.is_written.tolist(),
        data_source=prompt.data_source,
        row=msgspec.json.decode(problem.row or "{}"),
        tests=problem.tests,
        setup=problem.setup,
        is_truncated=done.tokens.is_truncated,
        max_tokens=ticket.sampling.max_new_tokens,
        language=problem.language,
    )
