"""What the buffer's tests share: small configurations, made-up prompts and groups, a clock that
only moves when told.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from composing import compose_unchecked

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import audit, reading
from async_rl.buffer.store.store import Store
from async_rl.config.base import replace
from async_rl.config.run import KEPT_GROUPS, RunConfig
from async_rl.core.calls import AgentCall
from async_rl.core.heads import pack_group
from async_rl.core.types import (
    NO_VERSION,
    CodeProblem,
    DropReason,
    Group,
    Prompt,
    Purpose,
    Score,
    Ticket,
    Trajectory,
    Verdict,
)
from async_rl.data.prompt_file import PromptOrder
from async_rl.protocol.buffer import (
    CommitStep,
    FailGroup,
    ForgetBefore,
    PutGroup,
    RequestWork,
    StartEvaluation,
    Synced,
    SyncVersion,
    TakeBatch,
    TakenGroups,
    Work,
)


@cache
def _base() -> RunConfig:
    return compose_unchecked("ppo_code")


_BUFFER = {"max_staleness": "max_staleness_versions", "uses": "uses_per_group"}


def make_config(
    *,
    group_size: int = 2,
    max_attempts: int = 3,
    num_steps: int = 1000,
    lease_s: float = 30.0,
    recording: str = "off",
    **settings: Any,
) -> RunConfig:
    """settings: of the buffer, some by shorter names."""
    base = _base()
    settings = {"groups_per_step": 2, "max_staleness": 1, "age_rule": "drop"} | settings
    buffer = {_BUFFER.get(name, name): value for name, value in settings.items()}
    return replace(
        base,
        num_steps=num_steps,
        recording=recording,
        buffer=replace(base.buffer, **buffer),
        generation=replace(base.generation, group_size=group_size, max_attempts=max_attempts),
        timeouts=replace(base.timeouts, call_s=lease_s / 3, group_s=120.0),
    )


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakePrompts:
    """`num_train` prompts over and over, `num_held_out` for evaluation."""

    def __init__(self, num_train: int = 5, num_held_out: int = 3) -> None:
        self.num_train = num_train
        self.num_held_out = num_held_out
        self.order = PromptOrder(0, num_train, shuffle=False)

    vocabulary_size = 1000

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        if purpose is Purpose.TRAIN:
            return self.train(self.order.index(index))
        return _prompt(f"e{index}")

    def train(self, row: int) -> Prompt:
        return _prompt(f"t{row}")


def _prompt(name: str) -> Prompt:
    return Prompt(
        prompt_id=name,
        text=f"text of {name}",
        token_ids=np.array([1, 2], np.int32),
        data_source="fake",
        problem=CodeProblem(tests=[]),
    )


def make_trajectory(
    versions: Sequence[int],
    *,
    passes: bool = True,
    trained: bool = True,
    is_truncated: bool = False,
    calls: tuple[AgentCall, ...] = (),
    clock: tuple[float, ...] = (),
) -> Trajectory:
    """Two prompt tokens and one response token per version."""
    length = 2 + len(versions)
    return Trajectory(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        prompt_length=2,
        loss_mask=np.array([False, False] + [trained] * len(versions)),
        behavior_logprobs=np.array([0.0, 0.0] + [-0.5] * len(versions), np.float32),
        versions=np.array([NO_VERSION, NO_VERSION, *versions], np.int32),
        is_truncated=is_truncated,
        score=Score(
            reward=1.0 if passes else 0.0,
            parts={"style": 0.5 + passes},
            verdicts=(Verdict.PASS if passes else Verdict.WRONG_ANSWER,),
            latency_s=0.01,
        ),
        calls=calls,
        clock=clock,
    )


def make_group(
    ticket: Ticket,
    *,
    versions: Sequence[int] | None = None,
    generator: str = "generator-0",
    generation_s: float = 0.5,
    **kinds: Any,
) -> Group:
    versions = [ticket.admitted_version] * 3 if versions is None else versions
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        prompt_id=ticket.prompt.prompt_id,
        purpose=ticket.purpose,
        data_source=ticket.prompt.data_source,
        generator=generator,
        admitted_version=ticket.admitted_version,
        trajectories=[make_trajectory(versions, **kinds) for _ in range(ticket.num_samples)],
        generation_s=generation_s,
    )


@contextlib.asynccontextmanager
async def opened(
    path: Path,
    config: RunConfig | None = None,
    prompts: FakePrompts | None = None,
    clock: Clock | None = None,
    kept_groups: int = KEPT_GROUPS,
    **settings: Any,
) -> AsyncIterator[BufferService]:
    """A recovered service on the store at `path`. settings: of `make_config`, without a config."""
    clock = clock or Clock()
    config = config or make_config(**settings)
    path.mkdir(exist_ok=True)
    async with Store(path, clock=clock) as store:
        yield BufferService(
            config, prompts or FakePrompts(), store, clock=clock, kept_groups=kept_groups
        )


def ask(version: int, **more: Any) -> RequestWork:
    usual = {"generator": "generator-0", "incarnation": "a", "credit": 8, "wait_s": 0.0}
    return RequestWork(version=version, **(usual | more))


async def tickets(service: BufferService, version: int, **kinds: Any) -> list[Ticket]:
    work = await service.request_work(ask(version, **kinds))
    assert isinstance(work, Work)
    return work.tickets


async def take(service: BufferService, train_version: int, wait_s: float = 0.0) -> TakenGroups:
    batch = await service.take_batch(TakeBatch(train_version=train_version, wait_s=wait_s))
    assert isinstance(batch, TakenGroups)
    return batch


async def taken_ids(service: BufferService, version: int, wait_s: float = 0.0) -> list[int]:
    """Take a batch; return its groups."""
    return [group.group_id for group in (await take(service, version, wait_s)).groups]


async def settle() -> None:
    """Lets every task that can go on do so; the store's thread needs real time, so a flush is part
    of what is awaited elsewhere.
    """
    for _ in range(10):
        await asyncio.sleep(0)


async def put(service: BufferService, ticket: Ticket, **kinds: Any) -> None:
    await service.put_group(PutGroup(payload=pack_group(make_group(ticket, **kinds))))


async def put_passes(service: BufferService, ticket: Ticket, passes: Sequence[bool]) -> None:
    """Put a group whose samples pass or fail like this."""
    group = make_group(ticket)
    versions = [ticket.admitted_version] * 3
    samples = [make_trajectory(versions, passes=each) for each in passes]
    group = msgspec.structs.replace(group, trajectories=samples)
    await service.put_group(PutGroup(payload=pack_group(group)))


async def put_all(service: BufferService, version: int = 0, **kinds: Any) -> list[int]:
    """Finish every group for which there is a ticket; return their ids."""
    given = await tickets(service, version)
    # Together: one commit for all.
    await asyncio.gather(*(put(service, ticket, **kinds) for ticket in given))
    return [ticket.group_id for ticket in given]


async def commit(service: BufferService, version: int, group_ids: Sequence[int]) -> None:
    await service.commit_step(CommitStep(version=version, group_ids=group_ids))


async def train(service: BufferService, version: int) -> list[int]:
    """Train the next batch on weights of this version; return its groups."""
    group_ids = [group.group_id for group in (await take(service, version)).groups]
    await commit(service, version + 1, group_ids)
    return group_ids


async def step(service: BufferService, version: int, **kinds: Any) -> list[int]:
    """Make groups with weights of this version and train the next batch; return its groups."""
    await put_all(service, version, **kinds)
    return await train(service, version)


async def sync(service: BufferService, version: int, incarnation: str = "") -> int:
    """Start the learner at this version; return the number of its life."""
    reply = await service.sync_version(SyncVersion(version=version, incarnation=incarnation))
    assert isinstance(reply, Synced)
    return reply.life


async def evaluate(service: BufferService, version: int) -> None:
    await service.start_evaluation(StartEvaluation(version=version))


async def forget(service: BufferService, version: int) -> None:
    await service.forget_before(ForgetBefore(version=version))


def problems(path: Path, config: RunConfig) -> list[str]:
    """The promises that the history of a store breaks."""
    with reading(path) as connection:
        return audit(connection, config.buffer).problems


async def fail(
    service: BufferService,
    group_id: int,
    attempt: int,
    reason: DropReason = DropReason.SCORING_FAILED,
    message: str = "no verifier\nanswered",
) -> None:
    failure = FailGroup(group_id=group_id, attempt=attempt, reason=reason, message=message)
    await service.fail_group(failure)


def rows(run_dir: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """What a query finds in the store, or changes there."""
    path = run_dir / "store.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(query, values).fetchall()


def states(run_dir: Path) -> dict[int, str]:
    return dict(rows(run_dir, "SELECT group_id, state FROM groups"))
