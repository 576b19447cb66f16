"""Streamed answers as server-sent events.

Invariant: the first list of events comes once the policy has written something, so an answer that
fails before that is an error with a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from async_rl.core.errors import AsyncRLError
from async_rl.sessions.calls import Answer
from async_rl.sessions.errors import error_of, outage
from async_rl.sessions.forms.form import Event, Exchange
from async_rl.sessions.refusals import Refused
from async_rl.sessions.session import Session


async def events_of(exchange: Exchange, session: Session) -> AsyncIterator[list[Event]]:
    """The events of a streamed answer, in lists that come together."""
    queue: asyncio.Queue[tuple[int, str | Answer]] = asyncio.Queue()

    async def one(index: int) -> None:
        call = exchange.calls[index]
        answer = await session.answer(call, lambda text: queue.put_nowait((index, text)))
        queue.put_nowait((index, answer))

    answers: dict[int, Answer] = {}
    tasks = [asyncio.create_task(one(index)) for index in range(len(exchange.calls))]
    try:
        is_open = False
        while len(answers) < len(tasks):
            index, news = await _next_of(queue, tasks)
            events = [] if is_open else exchange.opened()
            is_open = True
            if isinstance(news, Answer):
                answers[index] = news
                yield [*events, *exchange.done(index, news)]
            else:
                yield [*events, *exchange.part(index, news)]
        yield exchange.closed([answers[index] for index in sorted(answers)])
    finally:
        # A client that leaves ends its calls; they record what it has read.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_of(
    queue: asyncio.Queue[tuple[int, str | Answer]], tasks: list[asyncio.Task[None]]
) -> tuple[int, str | Answer]:
    """The next entry of the queue. Raises the exception of a task that failed."""
    getting = asyncio.create_task(queue.get())
    running = {task for task in tasks if not task.done()}
    while not getting.done():
        await asyncio.wait({getting, *running}, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in running if task.done()]:
            running.discard(task)
            if task.exception() is not None:
                getting.cancel()
                task.result()
    return getting.result()


async def lines_of(first: list[Event], events: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    """The events as lines of the stream; the last one is the error, if the answer fails."""
    yield b"".join(_line(*event) for event in first)
    try:
        async for more in events:
            yield b"".join(_line(*event) for event in more)
    except Refused as refused:
        yield _line("error", error_of(refused))
    except AsyncRLError as error:
        yield _line("error", error_of(outage(error)))


def _line(name: str, value: Any) -> bytes:
    data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"
