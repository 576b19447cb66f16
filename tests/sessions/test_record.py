"""What a session serves is what it trains: ids, log-probs, versions, each token once."""

import asyncio
from typing import Any

import numpy as np
import pytest
from clients_support import user, using
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions_support import (
    CHATML,
    END,
    TEMPLATES,
    TRIMS,
    Policy,
    Row,
    answered,
    changed,
    open_session,
    said,
)  # fmt: skip

from async_rl.core.calls import Support
from async_rl.protocol.generator import Completion
from async_rl.sessions.calls import Answer, Call, Context
from async_rl.sessions.errors import Refused
from async_rl.sessions.session import PIECE_TOKENS, Session

LONG = " ".join(["a b c"] * 30)


def ask(session: Session, messages: list[Any], tools: list[Any] | None = None, **how: Any) -> Any:
    call = session.chat_call(messages, tools or [], **how)
    return asyncio.run(answered(session, call)).message


def trained(row: Row) -> list[tuple[Any, ...]]:
    """(ids before, id, log-prob, version) of each trained token."""
    ids = np.concatenate([row.prompt, row.tokens.token_ids])
    found = []
    for path in row.paths():
        at = path[-1] - len(row.prompt)
        if at >= 0 and row.tokens.is_written[at]:
            numbers = row.tokens.logprobs[at], row.tokens.versions[at]
            found.append((tuple(ids[path[:-1]].tolist()), int(ids[path[-1]]), *map(float, numbers)))
    return sorted(found)


def served(policy: Policy) -> list[tuple[Any, ...]]:
    return sorted(
        ((*before, *done.token_ids[:at].tolist()), int(done.token_ids[at]), *map(float, numbers))
        for before, done in policy.served
        for at, numbers in enumerate(zip(done.logprobs, done.versions, strict=True))
    )


def test_an_answer_that_is_cut_is_closed_for_the_next_one() -> None:
    session, policy = open_session(CHATML, ["one two three four", "x"])
    first = ask(session, [said("go")], max_tokens=3)
    assert first["content"] == "one two"
    ask(session, [said("go"), first, said("on")])
    text = session.chat.decode(np.array(policy.served[1][0]), with_special=True)
    assert f"one two{END}\n<|im_start|>user\non" in text


def test_a_template_that_shortens_answers_changes_no_recorded_token() -> None:
    session, policy = open_session(TRIMS, ["thinking so two", "three"])
    first = ask(session, [said("go")])
    ask(session, [said("go"), first, said("on")])
    text = session.chat.decode(np.array(policy.served[1][0]), with_special=True)
    assert text == f"[user] go\n[assistant] thinking so two{END}\n[user] on\n[assistant] "


def test_a_call_without_room_is_refused_and_counts_as_truncation() -> None:
    session, _ = open_session(CHATML, ["one two three"], limit=20)
    first = ask(session, [said("go")])
    with pytest.raises(Refused) as refused:
        ask(session, [said("go"), first, said("a b c d e f g h i j k l")])
    assert refused.value.code == "context_length_exceeded"
    assert session.is_truncated
    assert Row(session).num_segments == 1


def complete(session: Session, prompt: str) -> str:
    context = session.chat.text_context(session.record, prompt, session.limit)
    call = Call(context=context, prompt=prompt, stops=("stop",))
    return str(asyncio.run(answered(session, call)).content)


@pytest.mark.parametrize(
    ("repeated", "num_segments"),
    # The whole answer is trained in a segment of its own, or in the one that continues it.
    [("go one ", 2), ("go one stop ", 1)],
)
def test_a_text_prompt_continues_an_answer_with_its_stop_text_or_without(
    repeated: str, num_segments: int
) -> None:
    session, policy = open_session("", ["one stop two", "three"])
    assert complete(session, "go ") == "one "
    assert complete(session, f"{repeated}more ") == "three"
    assert session.chat.decode(np.array(policy.served[1][0])) == f"{repeated}more "
    row = Row(session)
    assert (row.num_segments, len(trained(row))) == (num_segments, 3 + 2)


STEP = st.tuples(
    st.sampled_from(["continue", "branch", "compact", "tools", "retry", "edit", "cancel"]),
    st.integers(0, 9),
    st.lists(st.sampled_from(["so", "two", " ", "x", "<tool_call>", "{", "ü"]), max_size=6),
    st.booleans(),
    st.sampled_from([None, None, 1, 3]),
)
STEPS = st.lists(STEP, min_size=1, max_size=9)


@settings(max_examples=80)
@given(template=st.sampled_from(TEMPLATES), steps=STEPS, prompt=st.sampled_from(["go", "add"]))
def test_ids_served_are_ids_trained_and_nothing_twice(
    template: str, steps: list[Any], prompt: str
) -> None:
    session, policy = open_session(template, prompt=prompt)
    threads: list[list[Any]] = [[said("go")]]
    for kind, pick, words, is_newer, limit in steps:
        policy.version += is_newer
        policy.say("".join(words) or "ok")
        thread = changed(list(threads[pick % len(threads)]), kind, pick)
        tools = [{"function": {"name": "f"}}] if kind == "tools" else []
        call = session.chat_call(thread, tools, max_tokens=limit)
        if kind == "cancel":
            (number,) = session.begin([call])
            session.record.begin(number, call).size = 3
            session.record.cancel(number)
            continue
        if kind == "retry" and (known := session.repeated(repr(call.history).encode())):
            message = known[0].message
        else:
            (number,) = session.begin([call], repr(call.history).encode())
            message = asyncio.run(session.answer(call, number)).message
        threads.append([*thread, message])
    if not policy.served:
        return
    row = Row(session)
    assert trained(row) == served(policy)
    assert len(row.tokens.token_ids) == session.record.num_tokens()
    assert not row.tokens.logprobs[~row.tokens.is_written].any()
    assert (row.tokens.versions[~row.tokens.is_written] == -1).all()
    # A segment is not part of another one, and no two begin with equal tokens that nobody wrote.
    ids = np.concatenate([row.prompt, row.tokens.token_ids])
    is_written = np.concatenate([row.prompt < 0, row.tokens.is_written])
    paths = [tuple(ids[path].tolist()) for path in row.paths()]
    read = [path for path, written in zip(paths, is_written, strict=True) if not written]
    assert len(set(read)) == len(read)


def supports(session: Session, policy: object, **call: object) -> list[Support]:
    context = session.record.match_ids(session.record.context(None, [1, 2]).token_ids)
    call.setdefault("support", session.supported())
    asyncio.run(answered(session, Call(context=context, **call)))  # type: ignore[arg-type]
    return policy.supports  # type: ignore[attr-defined,no-any-return]


def test_a_call_without_a_support_has_that_of_the_run() -> None:
    session, policy = open_session(texts=["a", "a"])
    session.support = Support(top_k=5, top_p=0.9, min_tokens=1)
    assert supports(session, policy) == [session.support]
    # The run decides top_k and top_p of a call with a support too.
    asked = session.supported(grammar="x", logit_bias={3: 1.0}, min_tokens=9)
    found = Support(top_k=5, top_p=0.9, grammar="x", logit_bias={3: 1.0}, min_tokens=9)
    assert supports(session, policy, support=asked)[1:] == [found]


def test_a_length_counts_over_the_pieces_of_an_answer() -> None:
    session, policy = open_session(texts=[LONG])
    session.support = Support(min_tokens=PIECE_TOKENS + 3)
    found = [support.min_tokens for support in supports(session, policy, stops=("never",))]
    assert found[:3] == [PIECE_TOKENS + 3, 3, 0]


def test_an_answer_with_a_grammar_is_one_request() -> None:
    session, policy = open_session(texts=[LONG])
    asked = Support(grammar="x")
    assert supports(session, policy, stops=("never",), support=asked) == [asked]


AGAIN = {"x-stainless-retry-count": "1"}


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
