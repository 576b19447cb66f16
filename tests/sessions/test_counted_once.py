"""Nothing that the agent has not read is trained, and nothing counts twice."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from clients_support import user, using
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions_support import answered, open_session
from test_apis import LONG, blocking

from async_rl.core.calls import Support
from async_rl.protocol.generator import Completion
from async_rl.sessions.calls import Answer, Call, Context
from async_rl.sessions.errors import Refused

AGAIN = {"x-stainless-retry-count": "1"}


async def test_an_answer_of_n_is_not_trained_if_the_session_ends_before_the_last() -> None:
    async with using(["one"]) as (found, session, policy):
        session.write, begun, _ = blocking(policy, ("1.0",))
        create = found.openai.chat.completions.create
        asked = asyncio.ensure_future(create(model="policy", messages=[user("go")], n=2))
        await begun.wait()
        assert list(session.record.turns) == [0]
        session.close("its sample is complete")
        assert session.record.turns == {}
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("key", [AGAIN, {"idempotency-key": "a"}])
async def test_a_stream_that_is_sent_again_has_the_recorded_answer(key: dict[str, str]) -> None:
    async with using([LONG, "other"]) as (found, session, _):
        texts = []
        for headers in ({} if key is AGAIN else key, key):
            stream = await found.openai.chat.completions.create(
                model="policy", messages=[user("go")], stream=True, extra_headers=headers
            )
            chunks = [chunk async for chunk in stream]
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            assert chunks[-1].choices[0].finish_reason == "stop"
        assert texts == [LONG, LONG]
    assert len(session.record.turns) == 1


async def test_a_request_that_is_sent_again_while_its_answer_is_written_has_one_answer() -> None:
    async with using(["one", "two"]) as (found, session, policy):
        begun, may_write = asyncio.Event(), asyncio.Event()

        async def write(name: str, *given: Any) -> Any:
            if name.startswith("0."):
                begun.set()
                await may_write.wait()
            return await policy(name, *given)

        session.write = write
        body = json.dumps({"model": "policy", "messages": [user("go")]}).encode()
        path = "/v1/chat/completions"
        # Its client has left, which the server has not noticed.
        first = asyncio.ensure_future(found.http.post(path, content=body))
        await begun.wait()
        again = await found.http.post(path, content=body, headers=AGAIN)
        assert again.json()["choices"][0]["message"]["content"] == "one"
        may_write.set()
        assert (await first).status_code == 409
    assert len(session.record.turns) == 1


async def test_a_reward_that_is_sent_again_counts_once() -> None:
    async with using() as (found, session, _):
        owner = {"authorization": f"Bearer {session.session_key}"}
        for sign in ({}, AGAIN, {}, {"idempotency-key": "a"}, {"idempotency-key": "a"}):
            how: Any = {"json": 0.5, "headers": owner | sign}
            assert (await found.http.post("/v1/session/reward", **how)).status_code == 200
    assert [reward.parts for reward in session.rewards] == [{"reward": 0.5}] * 3


CALL = st.fixed_dictionaries(
    {
        "reads": st.integers(1, 40),
        "writes": st.integers(1, 120),
        "most": st.sampled_from([None, 10, 50]),
        "has_stop": st.booleans(),
        "has_grammar": st.booleans(),
        "delay": st.integers(0, 4),
    }
)


@settings(max_examples=60)
@given(calls=st.lists(CALL, min_size=1, max_size=6), limit=st.integers(60, 500))
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
