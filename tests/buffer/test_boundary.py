"""What another process may send to the buffer: a group is either valid, or refused with its sender
and the reason, and no message ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from buffer_support import (
    make_config,
    make_group,
    make_trajectory,
    opened,
    put,
    run,
    states,
    step,
    sync,
    tickets,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from async_rl.buffer.service import BufferService
from async_rl.core import codec
from async_rl.core.calls import AgentCall
from async_rl.core.errors import AsyncRLError, ProtocolError
from async_rl.core.heads import PackedGroup, PackedSample, pack_group, read_group
from async_rl.core.types import DropReason, Group, Score, StepScore, Trajectory
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import FailGroup, PutGroup, RequestWork

VALID = make_trajectory([0, 0, 0])
FromGenerators = RequestWork | PutGroup | FailGroup


def words(data: bytes, index: int, value: Any) -> bytes:
    """The array with one element changed."""
    array = np.frombuffer(data, type(value)).copy()
    array[index] = value
    return array.tobytes()


def tokens(index: int, value: int) -> Callable[[PackedGroup, PackedSample], dict[str, Any]]:
    return lambda group, _: {"token_ids": words(group.token_ids, index, np.int32(value))}


def logprob(index: int, value: float) -> Callable[[PackedGroup, PackedSample], dict[str, Any]]:
    return lambda group, _: {
        "behavior_logprobs": words(group.behavior_logprobs, index, np.float32(value))
    }


def scored(**fields: Any) -> dict[str, Any]:
    return {"score": msgspec.structs.replace(VALID.score, **fields)}


# Of the last sample: three tokens after a prompt of two.
INVALID_SAMPLES: dict[str, dict[str, Any]] = {
    "more tokens": {"response_length": 4},
    "a negative number of tokens": {"response_length": -3, "runs": [(-3, 0, True)]},
    "no run": {"runs": []},
    "a run of no tokens": {"runs": [(3, 0, True), (0, 0, True)]},
    "a run of fewer than no tokens": {"runs": [(4, 0, True), (-1, 0, True)]},
    "version of the far future": {"runs": [(3, 1_000_000, True)]},
    "version one too new": {"runs": [(2, 0, True), (1, 1, True)]},
    "version below none": {"runs": [(2, 0, True), (1, -2, False)]},
    "trained without a version": {"runs": [(2, 0, True), (1, -1, True)]},
    "two moments": {"clock": (0.1, 0.2)},
    "reward nan": scored(reward=math.nan),
    "reward infinite": scored(reward=-math.inf),
    "reward that overflows a sum": scored(reward=1.7e308),
    "part nan": scored(parts={"style": math.nan}),
    "latency negative": scored(latency_s=-1.0),
    "latency nan": scored(latency_s=math.nan),
    "step after the end": scored(steps=(StepScore(end_tokens=4, reward=1.0),)),
    "step before the start": scored(steps=(StepScore(end_tokens=-1, reward=1.0),)),
    "steps out of order": scored(
        steps=(StepScore(end_tokens=3, reward=1.0), StepScore(end_tokens=1, reward=1.0))
    ),
    "call after the end": {"calls": (AgentCall(end_tokens=4, num_tokens=1),)},
    "call before the start": {"calls": (AgentCall(end_tokens=-1, num_tokens=1),)},
    "two calls with one end": {"calls": (AgentCall(end_tokens=3, num_tokens=1),) * 2},
    "call nan": {"calls": (AgentCall(end_tokens=3, num_tokens=1, reward=math.nan),)},
    "step nan": scored(steps=(StepScore(end_tokens=1, reward=math.nan),)),
}
INVALID_ARRAYS: dict[str, Callable[[PackedGroup, PackedSample], dict[str, Any]]] = {
    "log-prob above 0": logprob(-1, 0.01),
    "log-prob nan": logprob(-1, math.nan),
    "log-prob infinite": logprob(0, -math.inf),
    "log-probs too few": lambda group, _: {"behavior_logprobs": group.behavior_logprobs[:-4]},
    "log-probs cut": lambda group, _: {"behavior_logprobs": group.behavior_logprobs[:-1]},
    "tokens negative": tokens(-1, -1),
    "token beyond the vocabulary": tokens(0, 1000),
    "tokens none": lambda *_: {"token_ids": b""},
    "tokens too many": lambda group, _: {"token_ids": bytes(group.token_ids) + b"\0\0\0\0"},
    "tokens of another prompt": lambda group, _: {"prompt": words(group.prompt, 0, np.int32(9))},
    "prompt of another length": lambda group, _: {"prompt": group.prompt[:4]},
    "no prompt": lambda *_: {"prompt": b""},
}
INVALID = [*INVALID_SAMPLES, *INVALID_ARRAYS]


def damaged(group: Group, name: str) -> PackedGroup:
    """The group with a fault in its last sample, which is its greedy answer if it has one."""
    packed = read_group(pack_group(group))
    *others, last = packed.members
    if name not in INVALID_SAMPLES:
        return msgspec.structs.replace(packed, **INVALID_ARRAYS[name](packed, last))
    last = msgspec.structs.replace(last, **INVALID_SAMPLES[name])
    if packed.baseline is not None:
        return msgspec.structs.replace(packed, baseline=last)
    return msgspec.structs.replace(packed, samples=[*others, last])


async def deliver(service: BufferService, message: Message) -> Message:
    """What the server does with a message: decode it, call its handler."""
    request: Any = codec.decode(codec.encode(message), FromGenerators)  # type: ignore[arg-type]
    return await service.handlers()[type(request)](request)


async def refused(service: BufferService, group: PackedGroup) -> str:
    """The reply to a put, empty if it is accepted."""
    try:
        await deliver(service, PutGroup(payload=codec.compressed(codec.encode(group))))
    except ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("baseline", [None, VALID], ids=["sample", "baseline"])
async def test_an_invalid_trajectory_is_refused_with_sender_and_reason_and_its_ticket_returns(
    tmp_path: Path, baseline: Trajectory | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, max_attempts=1 + len(INVALID)) as service:
        for attempt, name in enumerate(INVALID, 1):
            (ticket,) = await tickets(service, 0, credit=1)
            assert (ticket.group_id, ticket.attempt) == (0, attempt)
            group = msgspec.structs.replace(make_group(ticket), baseline=baseline)
            wrong = damaged(group, name)
            refusal = await refused(service, wrong)
            assert refusal.startswith("group 0 of generator-0 is refused: "), name
            assert service.state.num_refused == attempt
        assert states(tmp_path) == {0: "issued"}
        (ticket,) = await tickets(service, 0, credit=1)
        await deliver(service, PutGroup(payload=pack_group(make_group(ticket))))
        assert states(tmp_path) == {0: "ready"}
    assert sum("of generator-0 is refused: " in m for m in caplog.messages) == len(INVALID)


async def test_values_at_their_bounds_are_accepted(service: BufferService, tmp_path: Path) -> None:
    (ticket,) = await tickets(service, 0, credit=1)
    score = Score(
        reward=1e30,
        parts={"style": -1e30},
        verdicts=(),
        latency_s=0.0,
        steps=(StepScore(end_tokens=0, reward=1e30), StepScore(end_tokens=3, reward=0.0)),
    )
    sample = msgspec.structs.replace(
        VALID,
        token_ids=np.array([1, 2, 0, 5, 999], np.int32),
        behavior_logprobs=np.array([0.0, 0.0, 1e-3, -1e9, 0.0], np.float32),
        versions=np.array([-1, -1, 0, -1, 0], np.int32),
        loss_mask=np.array([False, False, True, False, True]),
        score=score,
        calls=(AgentCall(end_tokens=1, num_tokens=1), AgentCall(end_tokens=3, num_tokens=2)),
        branches=((3, -1), (4, 0)),
    )
    group = make_group(ticket)
    group = msgspec.structs.replace(group, trajectories=[sample, VALID], generation_s=0.0)
    await deliver(service, PutGroup(payload=pack_group(group)))
    assert states(tmp_path) == {0: "ready"}


async def test_a_group_that_is_not_the_result_of_its_ticket_is_refused_and_dropped_in_the_end(
    tmp_path: Path,
) -> None:
    faults: list[dict[str, Any]] = [
        {"prompt_id": "another"},
        {"purpose": "eval"},
        {"samples": []},
        {"generator": "generator-1"},
        {"generation_s": math.nan},
    ]
    async with opened(tmp_path, max_attempts=len(faults) + 1) as service:
        for wrong in faults:
            group = pack_group(make_group((await tickets(service, 0, credit=1))[0]))
            changed = msgspec.structs.replace(read_group(group), **wrong)
            assert "is refused" in await refused(service, changed), wrong
        group = pack_group(make_group((await tickets(service, 0, credit=1))[0], versions=[5]))
        expected = "sample 0: version 5 is not one of 0 to 0, the known ones"
        assert expected in await refused(service, read_group(group))
        assert service.state.drops == {"invalid": 1}
        assert states(tmp_path) == {0: "dropped"}


async def test_versions_that_a_learner_discarded_when_it_went_back_remain_known(
    service: BufferService,
) -> None:
    """A group may have begun before the learner went back."""
    for version in range(2):
        await step(service, version)
    (ticket, *_) = await tickets(service, 2)
    await sync(service, 0)
    await put(service, ticket, versions=[2, 2, 2])


# ---- hypothesis: real messages with one changed value, and with changed bytes


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a message as built-in types."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [path] + [inner for key, item in items for inner in paths(item, (*path, key))]


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from([-1, 0, 1, 2, 1_000_000, 2**31, 2**63, -(2**31), math.nan, math.inf]),
)
VALUES = st.one_of(
    NUMBERS,
    st.text(max_size=5),
    st.binary(max_size=24),
    st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=9)),
    st.lists(NUMBERS, max_size=3),
    st.none(),
    st.booleans(),
)


class Mutation(NamedTuple):
    """A kind of message, one of its values and another one for it, or bytes to be changed."""

    kind: int
    where: int
    value: Any
    flips: list[tuple[int, int]]


MUTATIONS = st.builds(
    Mutation,
    kind=st.sampled_from([0, 0, 0, 0, 1, 2]),
    where=st.integers(0, 10_000),
    value=VALUES,
    flips=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 255)), max_size=3),
)


def message(kind: int, group: Group) -> Message:
    steps = (StepScore(end_tokens=2, reward=0.5),)
    score = msgspec.structs.replace(VALID.score, steps=steps)
    calls = (AgentCall(end_tokens=0, num_tokens=9), AgentCall(end_tokens=3, num_tokens=3, role="r"))
    sample = msgspec.structs.replace(VALID, score=score, calls=calls)
    full = msgspec.structs.replace(group, trajectories=[sample, VALID], baseline=VALID)
    number = group.group_id
    return [
        PutGroup(payload=pack_group(full)),
        RequestWork(
            generator="generator-0", incarnation="a", version=0, credit=1, wait_s=0.0, held=[number]
        ),
        FailGroup(group_id=number, attempt=1, reason=DropReason.AGENT_FAILED, message="m"),
    ][kind]


def mutated(mutation: Mutation, group: Group) -> bytes:
    content = msgspec.msgpack.decode(codec.encode(message(mutation.kind, group)))
    if mutation.kind == 0:
        content["payload"] = msgspec.msgpack.decode(codec.decompressed(content["payload"]))
    path = paths(content)[mutation.where % len(paths(content))]
    if path and not mutation.flips:
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = mutation.value
    if isinstance(content, dict) and isinstance(content.get("payload"), dict | list):
        content["payload"] = codec.compressed(msgspec.msgpack.encode(content["payload"]))
    payload = bytearray(msgspec.msgpack.encode(content))
    for at, byte in mutation.flips:
        payload[at % len(payload)] = byte
    return bytes(payload)


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@example(mutations=[Mutation(kind=0, where=3, value=2**63, flips=[])])
@given(mutations=st.lists(MUTATIONS, min_size=20, max_size=20))
def test_mutated_messages_are_accepted_whole_or_refused_and_never_end_the_buffer(
    mutations: list[Mutation],
) -> None:
    async def scenario(directory: Path) -> None:
        config = make_config(groups_per_step=2 * len(mutations), max_attempts=1000)
        async with opened(directory, config) as service:
            for number, mutation in enumerate(mutations):
                lose_all(service)
                # Of an incarnation that no mutated message has replaced.
                given = await tickets(service, 0, credit=1, incarnation=f"life {number}")
                payload = mutated(mutation, make_group(given[0]))
                with contextlib.suppress(AsyncRLError):
                    request: Any = codec.decode(payload, FromGenerators)  # type: ignore[arg-type]
                    if isinstance(request, RequestWork):  # the longest wait is the sender's choice
                        request = msgspec.structs.replace(request, wait_s=0.0)
                    await service.handlers()[type(request)](request)
            await asyncio.wait_for(service.store.flush(), 10)
            # Whatever was accepted can be read, sampled and trained.
            lose_all(service)
            for new in await tickets(service, 0, credit=99, incarnation="last"):
                await put(service, new)
            ready = list(service.state.replay.ready)
            assert len(ready) == 4 * len(mutations)
            for group in await service.store.groups(ready):
                for sample in group.unpacked().trajectories:
                    rewards = [sample.score.reward, *sample.score.parts.values()]
                    assert np.isfinite(np.asarray(rewards, np.float32)).all()
                    assert np.isfinite(sample.behavior_logprobs).all()

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        run(scenario(Path(at)))


def lose_all(service: BufferService) -> None:
    for name in list(service.state.admission.generators):
        service.state.lose(name, "it is replaced")
