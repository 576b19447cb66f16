"""What another process may send to the buffer: a group is either valid, or refused with its sender
and the reason, and no message ends the process.
"""

import contextlib
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_support import ask, make_group, make_trajectory, opened, put, states, tickets
from tables import table

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


def tokens(index: int, value: int) -> Callable[[PackedGroup], dict[str, Any]]:
    return lambda group: {"token_ids": words(group.token_ids, index, np.int32(value))}


def logprob(index: int, value: float) -> Callable[[PackedGroup], dict[str, Any]]:
    return lambda group: {
        "behavior_logprobs": words(group.behavior_logprobs, index, np.float32(value))
    }


INVALID_SAMPLES: dict[str, dict[str, Any]] = table(__file__, "samples")
INVALID_ARRAYS: dict[str, Callable[[PackedGroup], dict[str, Any]]] = {
    "log-prob above 0": logprob(-1, 0.01),
    "log-prob nan": logprob(-1, math.nan),
    "log-prob infinite": logprob(0, -math.inf),
    "log-probs too few": lambda group: {"behavior_logprobs": group.behavior_logprobs[:-4]},
    "tokens negative": tokens(-1, -1),
    "token beyond the vocabulary": tokens(0, 1000),
    "tokens too many": lambda group: {"token_ids": bytes(group.token_ids) + b"\0\0\0\0"},
    "tokens of another prompt": lambda group: {"prompt": words(group.prompt, 0, np.int32(9))},
    "no prompt": lambda _: {"prompt": b""},
    "trained without a version": lambda group: {
        "behavior_logprobs": group.behavior_logprobs[:-4],
        **with_last(group, {"runs": [[2, 0, True], [1, -1, True]]}),
    },
}
INVALID = [*INVALID_SAMPLES, *INVALID_ARRAYS]


def with_last(group: PackedGroup, fields: dict[str, Any]) -> dict[str, Any]:
    """The change of the last sample, which is the greedy answer if there is one."""
    *others, last = group.members
    known = msgspec.to_builtins(last, builtin_types=(bytes, memoryview))
    score = known["score"] | fields.get("score", {})
    last = msgspec.convert(known | fields | {"score": score}, PackedSample)
    return {"samples": [*others, last]} if group.baseline is None else {"baseline": last}


def damaged(group: Group, name: str) -> PackedGroup:
    """The group with a fault in its last sample."""
    packed = read_group(pack_group(group))
    if name in INVALID_SAMPLES:
        changed = with_last(packed, INVALID_SAMPLES[name])
    else:
        changed = INVALID_ARRAYS[name](packed)
    return msgspec.structs.replace(packed, **changed)


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


async def test_a_group_of_another_ticket_is_refused_and_dropped_in_the_end(tmp_path: Path) -> None:
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


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a message as built-in types."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [path] + [inner for key, item in items for inner in paths(item, (*path, key))]


NUMBERS = [-1, 0, 1, 2, 1_000_000, 2**31, 2**63, -(2**31), 0.5, math.nan, math.inf]
OTHERS = ["text", b"", bytes(24), [], [math.nan], None, True, msgspec.msgpack.Ext(1, b"x")]


def messages(group: Group) -> list[Message]:
    steps = (StepScore(end_tokens=2, reward=0.5),)
    score = msgspec.structs.replace(VALID.score, steps=steps)
    calls = (AgentCall(end_tokens=0, num_tokens=9), AgentCall(end_tokens=3, num_tokens=3, role="r"))
    sample = msgspec.structs.replace(VALID, score=score, calls=calls)
    full = msgspec.structs.replace(group, trajectories=[sample, VALID], baseline=VALID)
    number = group.group_id
    put = PutGroup(payload=pack_group(full))
    fail = FailGroup(group_id=number, attempt=1, reason=DropReason.AGENT_FAILED, message="m")
    return [put, put, put, put, ask(0, held=[number]), fail]


def mutated(drawn: random.Random, message: Message) -> bytes:
    """The message with another value at one place, or with other bytes."""
    content = msgspec.msgpack.decode(codec.encode(message))
    if "payload" in content:
        content["payload"] = msgspec.msgpack.decode(codec.decompressed(content["payload"]))
    path = drawn.choice(paths(content))
    num_flips = drawn.randrange(4)
    if path and not num_flips:
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = drawn.choice([*NUMBERS, *OTHERS])
    if isinstance(content.get("payload"), dict | list):
        content["payload"] = codec.compressed(msgspec.msgpack.encode(content["payload"]))
    payload = bytearray(msgspec.msgpack.encode(content))
    for _ in range(num_flips):
        payload[drawn.randrange(len(payload))] = drawn.randrange(256)
    return bytes(payload)


async def test_mutated_messages_are_accepted_whole_or_refused(tmp_path: Path) -> None:
    drawn, most = random.Random(0), 200
    async with opened(tmp_path, groups_per_step=2 * most, max_attempts=1000) as service:
        for number in range(most):
            lose_all(service)
            # Of an incarnation that no mutated message has replaced.
            (ticket,) = await tickets(service, 0, credit=1, incarnation=f"life {number}")
            payload = mutated(drawn, drawn.choice(messages(make_group(ticket))))
            with contextlib.suppress(AsyncRLError):
                request: Any = codec.decode(payload, FromGenerators)  # type: ignore[arg-type]
                if isinstance(request, RequestWork):  # the longest wait is the sender's choice
                    request = msgspec.structs.replace(request, wait_s=0.0)
                await service.handlers()[type(request)](request)
        await service.store.flush()
        # Whatever was accepted can be read, sampled and trained.
        lose_all(service)
        for new in await tickets(service, 0, credit=9999, incarnation="last"):
            await put(service, new)
        ready = list(service.state.replay.ready)
        assert len(ready) == 4 * most
        for group in await service.store.groups(ready):
            for sample in group.unpacked().trajectories:
                rewards = [sample.score.reward, *sample.score.parts.values()]
                assert np.isfinite(np.asarray(rewards, np.float32)).all()
                assert np.isfinite(sample.behavior_logprobs).all()


def lose_all(service: BufferService) -> None:
    for name in list(service.state.admission.generators):
        service.state.lose(name, "it is replaced")
