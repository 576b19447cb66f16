"""Nothing that the agent has not read is trained, and nothing counts twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest
from clients_support import Clients, use, user
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions_support import Policy, answered, open_session
from test_apis import LONG, blocking

from async_rl.core.support import Support
from async_rl.protocol.generator import Completion
from async_rl.sessions.calls import Answer, Call, Context
from async_rl.sessions.errors import Refused
from async_rl.sessions.session import Session

AGAIN = {"x-stainless-retry-count": "1"}


def owner(session: Session, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {session.session_key}", **more}


class Slow:
    """A policy whose calls wait until `num` of them are open."""

    def __init__(self, policy: Policy, num: int) -> None:
        self._policy, self._num = policy, num
        self._names: list[str] = []
        self._all = asyncio.Event()
        self.limits: list[int] = []

    async def __call__(self, name: str, before: Any, limit: int, support: Any, shown: Any) -> Any:
        if not name.endswith(".0"):
            return await self._policy(name, before, limit, support, shown)
        self._names.append(name)
        self.limits.append(limit)
        if len(self._names) >= self._num:
            self._all.set()
        await self._all.wait()
        return await self._policy(name, before, limit, support, shown)


def test_an_answer_of_n_is_not_trained_if_the_session_ends_before_the_last() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        session.write, begun, _ = blocking(policy, ("1.0",))
        create = found.openai.chat.completions.create
        asked = asyncio.ensure_future(create(model="policy", messages=[user("go")], n=2))
        await begun.wait()
        assert list(session.record.turns) == [0]
        session.close("its sample is complete")
        assert session.record.turns == {}
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    use(agent, ["one"])


@pytest.mark.parametrize("key", [AGAIN, {"idempotency-key": "a"}])
def test_a_stream_that_is_sent_again_gets_the_recorded_answer(key: dict[str, str]) -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        texts = []
        for headers in ({} if key is AGAIN else key, key):
            stream = await found.openai.chat.completions.create(
                model="policy", messages=[user("go")], stream=True, extra_headers=headers
            )
            chunks = [chunk async for chunk in stream]
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            assert chunks[-1].choices[0].finish_reason == "stop"
        assert texts == [LONG, LONG]

    assert len(use(agent, [LONG, "other"]).record.turns) == 1


def test_a_request_that_is_sent_again_while_its_answer_is_written_has_one_answer() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        begun, may_write = asyncio.Event(), asyncio.Event()

        async def write(name: str, before: Any, limit: int, support: Any, shown: Any) -> Any:
            if name.startswith("0."):
                begun.set()
                await may_write.wait()
            return await policy(name, before, limit, support, shown)

        session.write = write
        how: Any = {"model": "policy", "messages": [user("go")]}
        body = json.dumps(how).encode()
        path = "/v1/chat/completions"
        # Its client has left, which the server has not noticed.
        first = asyncio.ensure_future(found.http.post(path, content=body))
        await begun.wait()
        again = await found.http.post(path, content=body, headers=AGAIN)
        assert again.json()["choices"][0]["message"]["content"] == "one"
        may_write.set()
        assert (await first).status_code == 409

    assert len(use(agent, ["one", "two"]).record.turns) == 1


def test_n_answers_and_text_that_are_sent_again_get_the_recorded_answers() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        said: list[Any] = []
        for headers in ({}, AGAIN):
            chat = await found.openai.chat.completions.create(
                model="policy", messages=[user("go")], n=2, extra_headers=headers
            )
            said.append([choice.message.content for choice in chat.choices])
            policy.say("four")
        assert said[0] == said[1]
        for headers in ({}, AGAIN):
            text = await found.openai.completions.create(
                model="policy", prompt="a ", extra_headers=headers
            )
            assert text.choices[0].text == "four"

    assert len(use(agent, ["one", "two"]).record.turns) == 3


def test_a_reward_that_is_sent_again_counts_once() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        for headers in ({}, AGAIN, {}, {"idempotency-key": "a"}, {"idempotency-key": "a"}):
            reply = await found.http.post(
                "/v1/session/reward", json=0.5, headers=owner(session, **headers)
            )
            assert reply.status_code == 200

    # Equal rewards without a sign of a repetition are several.
    assert [reward.parts for reward in use(agent).rewards] == [{"reward": 0.5}] * 3


def test_n_answers_stay_within_the_turns_of_a_session() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        session.max_turns = 3
        create = found.openai.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="its limit of 3"):
            await create(model="policy", messages=[user("go")], n=4)
        assert policy.served == []
        await create(model="policy", messages=[user("go")], n=2)
        with pytest.raises(openai.BadRequestError, match="its limit of 3"):
            await create(model="policy", messages=[user("go")], n=2)

    assert len(use(agent, ["one", "two", "three"]).record.turns) == 2


def test_calls_at_the_same_time_share_the_room_of_a_session() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        slow = session.write = Slow(policy, 4)
        create = found.openai.chat.completions.create
        # Two of them want more than there is.
        calls = [
            create(model="policy", messages=[user(name)], max_tokens=most)
            for name, most in zip("abcd", (None, 5000) * 2, strict=True)
        ]
        replies = await asyncio.gather(*calls)
        assert sorted(reply.choices[0].message.content for reply in replies) == list("klmn")
        assert all(limit >= 32 for limit in slow.limits)

    session = use(agent, list("klmn"), limit=1000)
    assert not session.is_truncated


CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "reads": st.integers(1, 40),
            "writes": st.integers(1, 120),
            "most": st.sampled_from([None, 10, 50]),
            "has_stop": st.booleans(),
            "has_grammar": st.booleans(),
            "delay": st.integers(0, 4),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(calls=CALLS, limit=st.integers(60, 500))
def test_a_call_reserves_what_it_uses(calls: list[Any], limit: int) -> None:
    session, _ = open_session(limit=limit)
    num_written = [0] * len(calls)

    async def write(name: str, before: Any, most: int, support: Support, shown: Any) -> Completion:
        number = int(name.partition(".")[0])
        for _ in range(calls[number]["delay"]):
            await asyncio.sleep(0)
        assert session.record.num_tokens() <= limit
        size = min(most, calls[number]["writes"] - num_written[number])
        num_written[number] += size
        return Completion(
            token_ids=np.ones(size, np.int32),
            logprobs=np.zeros(size, np.float32),
            versions=np.zeros(size, np.int32),
            is_truncated=num_written[number] < calls[number]["writes"],
        )

    async def ask() -> list[Any]:
        asked = [
            Call(
                context=Context(parent=None, token_ids=np.full(call["reads"], 100 + n, np.int32)),
                max_tokens=call["most"],
                stops=("never",) * call["has_stop"],
                support=Support(grammar="x" * call["has_grammar"]),
            )
            for n, call in enumerate(calls)
        ]
        async with asyncio.timeout(20):
            answering = [answered(session, call) for call in asked]
            return await asyncio.gather(*answering, return_exceptions=True)

    session.write = write
    answers = asyncio.run(ask())
    wanted = [min(call["writes"], call["most"] or limit) for call in calls]
    is_whole = [size == most for size, most in zip(num_written, wanted, strict=True)]
    assert all(isinstance(answer, Answer | Refused) for answer in answers)
    if sum(wanted) + sum(call["reads"] for call in calls) <= limit:
        assert all(is_whole)
    elif not any(isinstance(answer, Refused) for answer in answers):
        # An answer is cut where nothing is left.
        assert session.record.num_tokens() == limit


def test_an_answer_longer_than_its_first_piece_is_whole() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        reply = await found.openai.chat.completions.create(model="policy", messages=[user("go")])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (LONG, "stop")
        policy.say(LONG)
        reply = await found.openai.chat.completions.create(model="policy", messages=[user("on")])
        assert reply.choices[0].finish_reason == "length"

    session = use(agent, [LONG], limit=200)
    assert session.is_truncated
    assert session.record.num_tokens() == 200
