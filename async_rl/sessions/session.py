"""One session: an agent's calls of the policy for one sample, and the reward that it reports.

takes: calls in the gateway's own terms (forms/ translates the requests of OpenAI and Anthropic)
waits for: the engine
returns: whole answers, which are recorded before the agent sees them
woken by: the engine's tokens; `close`, after which every call is refused with the reason

An answer that a text or a token may stop is written in pieces of PIECE_TOKENS tokens.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from async_rl.core.calls import EVERYTHING, AgentCall, Support
from async_rl.core.schemas import require_applied
from async_rl.protocol.generator import Completion, cut, joined
from async_rl.sessions.calls import Answer, Call, Caller, Noted, Reward, Run, Usage, Write
from async_rl.sessions.chat import Chat, key_of
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.record import Record, Writing
from async_rl.sessions.tools import chosen, grammar_of

PIECE_TOKENS = 32
"""A piece is a request of the engine, which costs about as much as a few tokens: 32 keep that cost
at a tenth, and few tokens are written after the one that stops the answer.
"""


@dataclass(slots=True, kw_only=True)
class Session:
    """The calls of one sample.

    limit: the most tokens of all segments together. support: of the run's samples. run: a Python
    tool. responses: the messages up to each response that a client may name, and its body. token:
    the agent's; session_key: of who started the agent and rewards it. served: the answers that the
    policy gave, also those that nobody read. requests: the answers to each, none to a reward.
    names: the answers to a request by the id that its client got. unread: the answers of requests
    in progress. note: called with each request that has changed the session, before its answer
    leaves. why_silent: why an agent may be without an answer.
    """

    token: str
    session_key: str
    record: Record
    chat: Chat
    write: Write
    limit: int
    max_turns: int
    run: Run
    support: Support = EVERYTHING
    usage: Usage = field(default_factory=Usage)
    note: Callable[[Noted], None] = lambda request: None
    rewards: list[Reward] = field(default_factory=list)
    served: dict[int, AgentCall] = field(default_factory=dict)
    requests: dict[bytes, list[int]] = field(default_factory=dict)
    names: dict[str, list[int]] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    responses: dict[str, tuple[list[Any], Json]] = field(default_factory=dict)
    is_truncated: bool = False
    why_silent: str = "it has to use OPENAI_BASE_URL and OPENAI_API_KEY"
    closed: str = ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _answers: dict[int, Answer] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last_text(self) -> str:
        """The text of the newest trained answer, which the verifiers score; empty without any."""
        trained = [turn.text for turn in self.record.turns.values() if turn.caller.is_trained]
        return trained[-1] if trained else ""

    async def run_tool(self, body: bytes) -> Any:
        """Run the program of a request. Raises Refused."""
        self.require_open()
        self.usage.num_tool_runs += 1
        results, is_error = await self.run(body)
        self.usage.num_tool_errors += is_error
        return results

    def close(self, reason: str) -> None:
        """Refuse all further calls. Calls in progress are cancelled."""
        self.closed = reason
        self.forget(self.unread)

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
        is_single: bool = False,
        prefill: str = "",
        variables: Json | None = None,
        schema: Json | None = None,
        **support: Any,
    ) -> Call:
        """Return the call of a chat request. Raises Refused, DataError.

        choice: which tools to call; is_single: at most one; prefill: the beginning of the answer;
        variables: of the chat template; schema: that the answer fits; support: as in `supported`.
        """
        tools, forced, start = chosen(tools, choice, self.chat.form)
        if schema is not None and prefill:
            raise Refused("an answer with a schema cannot be begun; leave the last message out")
        grammar = grammar_of(schema, tools, forced, self.chat.form, start)
        start = prefill + start
        context, history = self.chat.context(
            self.record, messages, tools, limit=self.limit, start=start, variables=variables
        )
        return Call(
            context=context,
            history=history,
            max_tokens=max_tokens,
            stops=(*stops, *self.chat.form.single()) if is_single and tools else stops,
            start=start,
            prefill=prefill,
            tools=tools,
            support=self.supported(grammar=grammar, **support),
        )

    def supported(self, **limits: Any) -> Support:
        """Return the run's support with these limits; None limits nothing. Raises DataError if
        answers need not fit its schema.
        """
        given = {name: value for name, value in limits.items() if value}
        support = replace(self.support, **given)
        require_applied(support)
        return support

    def begin(self, calls: Sequence[Call], request: bytes = b"") -> list[int]:
        """Return a number for each answer to a request. Raises Refused if they are too many."""
        self.require_turns(len(calls), calls[0].caller)
        self.requests[request] = [next(self._numbers) for _ in calls]
        return self.requests[request]

    def repeated(self, request: bytes) -> list[Answer]:
        """Return the recorded answers to a request that the client sends again because they did not
        reach it. Without all of them none is trained, and the list is empty.
        """
        numbers = self.requests.get(request, [])
        if any(map(self.record.is_continued, numbers)):
            return []
        answers = [self._answers[number] for number in numbers if number in self._answers]
        if len(answers) == len(numbers):
            return answers
        self.forget(numbers)
        return []

    def forget(self, numbers: Iterable[int]) -> None:
        """Train none of these answers: the client has not got them."""
        for number in numbers:
            self.record.cancel(number)
            self._answers.pop(number, None)
            if number in self.served:
                self.served[number] = replace(self.served[number], left_out="unread")
        self._settled.set()

    async def answer(self, call: Call, number: int) -> Answer:
        """Let the policy write one answer, and record it; nothing of it if the call is cancelled.
        number: by `begin`.
        """
        await self._room_for(call)
        now = self.record.begin(number, call)
        try:
            with self.usage.calling():
                written, text, is_cut = await self._written(now)
                message = await self.chat.message_of(call, written, text, is_cut=is_cut)
            # The sample may be complete by now; then this answer must not change it.
            self._require_wanted(now)
        except BaseException:
            # In every case, also when the agent disconnects.
            self.forget([number])
            raise
        self._settled.set()
        num_tokens = len(written.token_ids)
        self.usage.num_turns += 1
        self.usage.num_tokens += num_tokens
        # By the limit of the session, not by the limit of the call.
        if call.caller.is_trained:
            self.is_truncated = is_cut and num_tokens != call.max_tokens
        self.served[number] = AgentCall(
            end_tokens=0,
            num_tokens=num_tokens,
            role=call.caller.role,
            left_out="" if call.caller.is_trained else "requested",
        )
        self.record.finish(number, written, message["content"], reply=key_of(message))
        # Its client has read what it continues, so it is not sent again.
        if (parent := call.context.parent) is not None:
            self._answers.pop(parent, None)
        if call.prompt:
            # Without messages a later request is recognized by its text: as the agent saw it, or
            # with the stop text of the answer, if the agent repeats that too.
            for shown in (text, self.chat.decode(written.token_ids)):
                self.record.texts[call.prompt + shown] = (number, shown)
        self._answers[number] = Answer(
            call=call, number=number, message=message, written=written, is_cut=is_cut
        )
        return self._answers[number]

    async def _written(self, now: Writing) -> tuple[Completion, str, bool]:
        """Return the tokens of an answer, its text, and whether a limit has cut it."""
        call = now.call
        parts: list[Completion] = []
        num_written = 0
        shown = call.alternatives
        size = await self._size(now, 0)
        if not size:
            raise self._no_room(self.record.num_tokens_with(now), call.caller)
        while size:
            before = np.concatenate([call.context.token_ids, *(p.token_ids for p in parts)])
            rest = replace(call.support, min_tokens=max(0, call.support.min_tokens - num_written))
            part = await self.write(f"{now.number}.{len(parts)}", before, size, rest, shown)
            # The first piece has the log-probs of the prompt.
            shown = replace(shown, num_prompt_top=None)
            self._require_wanted(now)
            parts.append(part)
            written = joined(parts)
            num_written = len(written.token_ids)
            text, num_kept = self.chat.text_of(written.token_ids, call)
            is_cut = part.is_truncated and num_kept is None
            # An engine starts a grammar with its request, so nothing continues one.
            is_last = not is_cut or call.support.grammar
            size = 0 if is_last else await self._size(now, num_written)
        return cut(written, num_written if num_kept is None else num_kept), text, is_cut

    async def _size(self, now: Writing, num_written: int) -> int:
        """Reserve tokens for the next piece, once no other call may return any; return how many."""
        call = now.call
        now.size = num_written
        most = self.limit if call.max_tokens is None else call.max_tokens - num_written
        enough = most if call.support.grammar else min(most, PIECE_TOKENS)
        now.waits = True
        # If every call waits, none of them will return anything.
        while self.limit - self.record.num_tokens_with(now) < enough and not all(
            other.waits for other in self.record.writing.values()
        ):
            self._settled.clear()
            await self._settled.wait()
            self._require_wanted(now)
        now.waits = False
        room = self.limit - self.record.num_tokens_with(now)
        # Half of the room: calls at the same time find some too, and most answers fit into it.
        piece = PIECE_TOKENS if call.stops or call.stop_ids else max(PIECE_TOKENS, room // 2)
        size = max(0, min(room, most if call.support.grammar else min(most, piece)))
        now.size += size
        return size

    def _require_wanted(self, now: Writing) -> None:
        """Raise Refused if the session is closed, or the client has sent the request again."""
        self.require_open()
        if now.number not in self.record.writing:
            raise Refused("the request was sent again, and its second answer counts", status=409)

    def require_turns(self, num_calls: int, caller: Caller | None = None) -> None:
        """Raise Refused unless so many more answers are within the limit: one for trained answers
        and one for others. caller: None = not known; then no session could have them."""
        self.require_open()
        num_turns = 0 if caller is None else self.record.num_turns(caller)
        if num_turns + num_calls > self.max_turns:
            self.is_truncated |= caller is not None and caller.is_trained
            raise Refused(
                f"the session has had {num_turns} answers, and {num_calls} more are above its limit"
                f" of {self.max_turns} (rollout.max_turns)",
                code="too_many_turns",
            )

    async def _room_for(self, call: Call) -> None:
        """Return once an answer may have a token. Raises Refused if it never may."""
        self.require_turns(1, call.caller)
        # Every segment counts: all of them are trained, as one row.
        while (num_tokens := self.record.num_tokens_for(call)) >= self.limit:
            if not (call.caller.is_trained and self.record.writing):
                raise self._no_room(num_tokens, call.caller)
            self._settled.clear()
            await self._settled.wait()
            self.require_turns(1, call.caller)

    def _no_room(self, num_tokens: int, caller: Caller) -> Refused:
        self.is_truncated |= caller.is_trained
        return Refused(
            f"this call would start with {num_tokens} tokens, and the session may have {self.limit}"
            " (data.max_response_tokens, every segment counted); shorten the history or raise it",
            code="context_length_exceeded",
        )
