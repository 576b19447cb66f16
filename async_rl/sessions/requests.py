"""The requests of the policy in one session, as a server gets them and as a later life of the
gateway repeats them.

Invariant: a session that repeats its noted requests, with the recorded answers of the policy, has
the turns, responses and rewards that its program knows.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from async_rl.core.errors import AsyncRLError
from async_rl.core.frozen import Value
from async_rl.sessions.calls import Answer, Noted, reward_of
from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.anthropic_messages import messages
from async_rl.sessions.forms.form import Exchange, Form, read
from async_rl.sessions.forms.openai_completions import chat_completions, completions, generate
from async_rl.sessions.forms.openai_responses import responses
from async_rl.sessions.session import Session

OPEN = "/sessions"
REWARD = "/v1/session/reward"
END = "/v1/session/end"
"""The paths by which a program outside the run takes, rewards and ends a session."""
FORMS: Mapping[str, Form] = {
    "/inference/v1/generate": generate,
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
}
_SMALL_BYTES = 1 << 15
"""A body of this size is read within milliseconds, which a thread would not shorten."""
T = TypeVar("T")


class Outcome(Value, forbid_unknown_fields=False):
    """The end of a session. error: why the program failed; empty if it did not."""

    error: str = ""


async def formed(form: Callable[[bytes, Session], T], body: bytes, session: Session) -> T:
    """Return what a form reads from a body: a large one on a thread, while other calls go on.
    Raises Refused, also for a value inside of messages and tools that is not there, or of another
    type: forms do not check them first.
    """
    try:
        if len(body) <= _SMALL_BYTES:
            return form(body, session)
        return await asyncio.to_thread(form, body, session)
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(
            f"a value in the request is missing or has the wrong type: {error!r}"
        ) from error


async def answered(session: Session, exchange: Exchange, request: Noted) -> Sequence[Answer]:
    """Return the answers to a request. If one of them fails, the rest is cancelled and none is
    trained, because the client reads none of them. Raises Refused.
    """
    calls = [replace(call, caller=request.caller) for call in exchange.calls]
    numbers = session.begin(calls, request.key)
    session.names[request.name] = numbers
    work = [
        asyncio.ensure_future(session.answer(*each)) for each in zip(calls, numbers, strict=True)
    ]
    session.unread.update(numbers)
    try:
        answers = await asyncio.gather(*work)
        session.note(request)
    except BaseException:
        for answering in work:
            answering.cancel()
        await asyncio.wait(work)
        session.forget(numbers)
        raise
    finally:
        session.unread.difference_update(numbers)
    return answers


async def repeat(session: Session, requests: Sequence[Noted]) -> Outcome | None:
    """Repeat the noted requests of an earlier life of the gateway; return the end of the session,
    if its program has ended it. The first request whose answers the journal lacks is the last one.
    """
    for request in requests:
        if request.path == END:
            outcome: Outcome = read(request.body or b"{}", Outcome)
            return outcome
        if request.path == REWARD:
            add_reward(session, request)
        elif request.path in FORMS:
            try:
                exchange = await formed(FORMS[request.path], request.body, session)
                exchange.head["id"] = request.name
                # It records the response, which a later request may name.
                exchange.reply(await answered(session, exchange, request))
            except AsyncRLError:
                # What its program says next continues what is there.
                return None
    return None


def add_reward(session: Session, request: Noted) -> None:
    """Add the reward of a request. Raises Refused."""
    reward = reward_of(read(request.body, Any), session.names)
    session.note(request)
    session.rewards.append(reward)
    session.requests[request.key] = []
