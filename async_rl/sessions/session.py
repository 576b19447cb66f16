"""One session: an agent's calls of the policy for one sample, and the reward that it reports.

takes: calls in the gateway's own terms (forms/ translates the requests of OpenAI and Anthropic)
waits for: the engine
returns: answers that are recorded before the agent sees them
woken by: the engine's tokens; `close`, after which every call is refused with the reason

A streamed answer, and one that a text may stop, is written in pieces of PIECE_TOKENS tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion, cut, joined
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.chat import Chat, before_stop, certain, key_of
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.record import Context, Record
from async_rl.sessions.tools import HERMES, as_text, chosen, parse_answer
from async_rl.sessions.usage import Usage

PIECE_TOKENS = 32
"""A piece is a request of the engine, which costs about as much as a few tokens: 32 keep that cost
at a tenth and still show text several times per second.
"""
Run = Callable[[bytes], Awaitable[tuple[Any, bool]]]
"""Runs the program of a request in the jail; returns what JSON can express, and whether the program
failed to run. Raises Refused.
"""
Write = Callable[[str, IntArray, int], Awaitable[Completion]]
"""(id of the call, tokens so far, most new tokens) -> the policy's continuation."""


@dataclass(slots=True)
class _Writing:
    """An answer that is being written.

    seen: the text that the agent has read. message: of a complete answer.
    """

    call: Call
    written: Completion | None = None
    seen: str = ""
    message: Json | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """The calls of one sample.

    limit: the most tokens of all segments together. task: with its row and tests. run: a
    Python tool. responses: the messages up to each response that a client may name, and its body.
    token: the agent's; session_key: of who started the agent and rewards it.
    """

    record: Record
    chat: Chat
    write: Write
    limit: int
    max_turns: int
    task: Json
    run: Run
    usage: Usage = field(default_factory=Usage)
    token: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    session_key: str = field(default_factory=lambda: f"session-{secrets.token_urlsafe(24)}")
    rewards: list[dict[str, float]] = field(default_factory=list)
    responses: dict[str, tuple[list[Any], Json]] = field(default_factory=dict)
    is_truncated: bool = False
    closed: str = ""
    last_text: str = ""
    _writing: dict[int, _Writing] = field(default_factory=dict)
    _answers: dict[int, Answer] = field(default_factory=dict)

    async def run_tool(self, body: bytes) -> Any:
        """Run the program of a request. Raises Refused."""
        self.require_open()
        self.usage.num_tool_runs += 1
        results, is_error = await self.run(body)
        self.usage.num_tool_errors += is_error
        return results

    def close(self, reason: str) -> None:
        """Refuse all further calls, and record what the agent has read of calls in progress: one
        that reads a part of a stream and ends is gone before its connection is.
        """
        self.closed = reason
        for number in list(self._writing):
            self._settle(number)

    def require_open(self) -> None:
        """Raise Refused once the session is closed."""
        if self.closed:
            raise Refused(f"the session has ended: {self.closed}", status=410, code="session_ended")

    def chat_call(
        self,
        messages: Sequence[Any],
        tools: list[Json],
        choice: str | Json | None = None,
        *,
        max_tokens: int | None = None,
        stops: tuple[str, ...] = (),
        is_streamed: bool = False,
        is_single: bool = False,
        prefill: str = "",
        variables: Json | None = None,
    ) -> Call:
        """Return the call of a chat request. Raises Refused.

        choice: which tools to call; is_single: at most one; prefill: the beginning of the answer;
        variables: of the chat template.
        """
        tools, start = chosen(tools, choice, self.chat.form)
        start = prefill + start
        context, history = self.chat.context(
            self.record, messages, tools, start=start, variables=variables or {}
        )
        return Call(
            context=context,
            history=history,
            max_tokens=max_tokens,
            stops=(*stops, *self.chat.form.single()) if is_single and tools else stops,
            # With tools the text may become a call, which only its end shows.
            in_pieces=is_streamed and not tools,
            start=start,
            prefill=prefill,
            tools=tools,
        )

    def repeated(self, call: Call) -> Answer | None:
        """Return the recorded answer to a request that the client sends again because the first
        answer did not reach it; None if there is none.
        """
        number = self.record.repeated(call.history) if call.history else -1
        return self._answers.get(number)

    async def answer(
        self, call: Call, on_text: Callable[[str], None] = lambda text: None
    ) -> Answer:
        """Let the policy write one answer, and record it.

        on_text: called with each further part of the text. A cancelled call records the text that
        was passed to on_text, because the agent has read that much.
        """
        room = self._room(call.context)
        limit = room if call.max_tokens is None else min(room, call.max_tokens)
        # Reserved now: calls at the same time must not fill the same room.
        number = self.record.begin(call.context, call.history, limit=limit)
        self._writing[number] = now = _Writing(call)
        try:
            with self.usage.calling():
                async for now.written, text, is_last in self._pieces(call, number, limit):
                    visible = certain(text, call.stops)
                    if call.in_pieces and not is_last and visible != now.seen:
                        on_text(visible[len(now.seen) :])
                        now.seen = visible
                assert now.written is not None, "an answer has a last piece"
                # The sample may be complete by now; then this answer must not change it.
                message = await self._message(call, now.written, text)
                self.require_open()
                rest = text[len(now.seen) :]
                now.seen, now.message = text, message
        finally:
            # In every case, also when the agent disconnects.
            self._settle(number)
        written = now.written
        self.is_truncated = written.is_truncated and len(written.token_ids) >= room
        on_text(rest)
        why = "stop"
        if "tool_calls" in message:
            why = "tool_calls"
        elif self._is_cut(call, written):
            why = "length"
        self._answers[number] = Answer(
            call=call,
            number=number,
            text=(call.start + text).removeprefix(call.prefill),
            message=message,
            written=written,
            why=why,
        )
        return self._answers[number]

    def _settle(self, number: int) -> None:
        """End an answer, once: return the reserved room, and keep the text that the agent has read,
        because its next call will contain it.
        """
        now = self._writing.pop(number, None)
        if now is None:
            return
        if now.written is None or not (now.seen or now.message):
            self.record.cancel(number)
        else:
            message = now.message or as_text(now.call.start + now.seen)
            self._finish(number, now.call, now.written, now.seen, message)

    async def _message(self, call: Call, written: Completion, text: str) -> Json:
        """Return a complete answer as a message, its tool calls read."""
        shown = call.start + text
        if call.in_pieces:
            # The agent has read all of it as text, and repeats it as text.
            return as_text(shown)
        # A parser would complete a call that the limit has cut.
        if self.chat.form == HERMES or not call.tools or self._is_cut(call, written):
            return parse_answer(shown)
        ids = written.token_ids
        whole = self.chat.decode(ids if written.is_truncated else ids[:-1], with_special=True)
        whole = before_stop(whole, call.stops)[0]
        return await self.chat.read_calls(call.tools, call.start, shown, whole, ids)

    async def _pieces(
        self, call: Call, number: int, limit: int
    ) -> AsyncIterator[tuple[Completion, str, bool]]:
        """Yield after each piece: the answer so far, its text, and whether it is complete."""
        parts: list[Completion] = []
        is_last = False
        while not is_last:
            left = limit - sum(len(part.token_ids) for part in parts)
            size = left
            if call.in_pieces or call.stops:
                size = min(left, PIECE_TOKENS)
            # The engine's prefix cache makes the next piece cost little more than its tokens.
            before = np.concatenate([call.context.token_ids, *(p.token_ids for p in parts)])
            part = await self.write(f"{number}.{len(parts)}", before, size)
            self.require_open()
            parts.append(part)
            written = joined(parts)
            text, num_kept = self._text(written.token_ids, call.stops)
            is_last = not part.is_truncated or size == left or num_kept is not None
            yield cut(written, slice(num_kept)), text, is_last

    def _finish(
        self, number: int, call: Call, written: Completion, text: str, message: Json
    ) -> None:
        self.last_text = message["content"]
        self.usage.num_turns += 1
        self.usage.num_tokens += len(written.token_ids)
        self.record.finish(number, written, reply=key_of(message))
        if call.prompt:
            # Without messages a later request is recognized by its text: as the agent saw it, or
            # with the stop text of the answer, if the agent repeats that too.
            for shown in (text, self.chat.decode(written.token_ids)):
                self.record.texts[call.prompt + shown] = (number, shown)

    def _is_cut(self, call: Call, written: Completion) -> bool:
        """Return whether the limit stopped the answer, instead of an end token or a stop text."""
        return written.is_truncated and self._text(written.token_ids, call.stops)[1] is None

    def _room(self, context: Context) -> int:
        """Return the tokens that an answer may have. Raises Refused."""
        self.require_open()
        if len(self.record.turns) >= self.max_turns:
            self.is_truncated = True
            raise Refused(
                f"the session has had {self.max_turns} answers, its limit (rollout.max_turns)",
                code="too_many_turns",
            )
        # Every segment counts: all of them are trained, as one row.
        num_tokens = self.record.num_tokens(context)
        if num_tokens >= self.limit:
            self.is_truncated = True
            raise Refused(
                f"this call would start with {num_tokens} tokens in the session, whose limit is"
                f" {self.limit} (data.max_response_tokens, every segment counted); shorten the"
                " history or raise it",
                code="context_length_exceeded",
            )
        return self.limit - num_tokens

    def _text(self, token_ids: IntArray, stops: Sequence[str]) -> tuple[str, int | None]:
        """Return the text before the first stop text, and the number of tokens up to the end of the
        stop text; None = all.
        """
        text, stop = before_stop(self.chat.decode(token_ids), stops)
        if not stop:
            return text, None
        num_kept = next(
            count
            for count in range(1, len(token_ids) + 1)
            if stop in self.chat.decode(token_ids[:count])
        )
        return text, num_kept
