"""The real, unchanged packages `openai` and `anthropic` as clients of an endpoint, in one form."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import anthropic
import httpx
import openai
from sessions_support import CHATML, Policy, endpoint, open_session

from async_rl.core.frozen import frozen
from async_rl.sessions.session import Session

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": ADD}
FUNCTION: Any = {"type": "function", **ADD}
CLAUDE: Any = {"name": "add", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_WHY = {
    "end_turn": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
}


@frozen
class Clients:
    """The clients of one session. http: with its token."""

    openai: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def clients(session: Session) -> AsyncIterator[Clients]:
    key = session.token
    async with (
        endpoint(session) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as chat,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude,
        httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60
        ) as http,
    ):
        yield Clients(openai=chat, claude=claude, http=http)


Use = Callable[[Clients, Session, Policy], Awaitable[None]]


def use(do: Use, texts: Iterable[str] = (), template: str = CHATML, **options: Any) -> Session:
    """Let an agent use a session whose policy writes these texts; return the session."""
    session, policy = open_session(template, texts, **options)

    async def main() -> None:
        async with clients(session) as found:
            await do(found, session, policy)

    asyncio.run(main())
    return session


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@frozen
class Reply:
    """One answer. calls: (id, name, arguments). items: of its history. parts: of a stream."""

    text: str
    calls: list[tuple[str, str, Any]]
    why: str
    num_written: int
    items: Sequence[Any]
    parts: list[str]


class Api(Protocol):
    """One API. ask: sends a history; result: the result of a tool as an item of a history."""

    async def ask(
        self, found: Clients, history: Sequence[Any], *, stream: bool = False, **more: Any
    ) -> Reply:
        """more: system, tools (bool), most (tokens)."""

    def result(self, call_id: str, text: str) -> Any: ...


class Chat:
    async def ask(
        self,
        found: Clients,
        history: Sequence[Any],
        *,
        stream: bool = False,
        system: str = "",
        tools: bool = False,
        most: int = 900,
    ) -> Reply:
        begin = [{"role": "system", "content": system}] if system else []
        how: Any = {"model": "policy", "messages": [*begin, *history], "max_tokens": most}
        how |= {"tools": [TOOL]} if tools else {}
        parts = []
        if stream:
            asked = {**how, "stream_options": {"include_usage": True}}
            async with found.openai.chat.completions.stream(**asked) as events:
                async for event in events:
                    if event.type == "content.delta":
                        parts.append(event.delta)
                reply: Any = await events.get_final_completion()
        else:
            reply = await found.openai.chat.completions.create(**how)
        message = reply.choices[0].message
        called = [call.function for call in message.tool_calls or []]
        return Reply(
            text=message.content or "",
            calls=[
                (call.id, function.name, json.loads(function.arguments))
                for call, function in zip(message.tool_calls or [], called, strict=True)
            ],
            why=reply.choices[0].finish_reason,
            num_written=reply.usage.completion_tokens,
            # The whole message with its null fields, as the package returns it.
            items=[message],
            parts=parts,
        )

    def result(self, call_id: str, text: str) -> Any:
        return {"role": "tool", "tool_call_id": call_id, "content": text}


class Responses:
    async def ask(
        self,
        found: Clients,
        history: Sequence[Any],
        *,
        stream: bool = False,
        system: str = "",
        tools: bool = False,
        most: int = 900,
    ) -> Reply:
        how: Any = {"model": "policy", "input": list(history), "max_output_tokens": most}
        how |= {"tools": [FUNCTION]} if tools else {}
        how |= {"instructions": system} if system else {}
        parts = []
        if stream:
            numbers = []
            async with found.openai.responses.stream(**how) as events:
                async for event in events:
                    numbers.append(event.sequence_number)
                    if event.type == "response.output_text.delta":
                        parts.append(event.delta)
                reply: Any = await events.get_final_response()
            assert numbers == list(range(len(numbers)))
        else:
            reply = await found.openai.responses.create(**how)
        calls = [item for item in reply.output if item.type == "function_call"]
        why = "tool_calls" if calls else "stop"
        if reply.status == "incomplete":
            why = _WHY[reply.incomplete_details.reason]
        return Reply(
            text=reply.output_text,
            calls=[(call.call_id, call.name, json.loads(call.arguments)) for call in calls],
            why=why,
            num_written=reply.usage.output_tokens,
            items=reply.output,
            parts=parts,
        )

    def result(self, call_id: str, text: str) -> Any:
        return {"type": "function_call_output", "call_id": call_id, "output": text}


class Messages:
    async def ask(
        self,
        found: Clients,
        history: Sequence[Any],
        *,
        stream: bool = False,
        system: str = "",
        tools: bool = False,
        most: int = 900,
    ) -> Reply:
        how: Any = {"model": "policy", "messages": list(history), "max_tokens": most}
        how |= {"tools": [CLAUDE]} if tools else {}
        how |= {"system": system} if system else {}
        parts = []
        if stream:
            async with found.claude.messages.stream(**how) as events:
                parts = [part async for part in events.text_stream]
                reply: Any = await events.get_final_message()
        else:
            reply = await found.claude.messages.create(**how)
        uses = [block for block in reply.content if block.type == "tool_use"]
        return Reply(
            text="".join(block.text for block in reply.content if block.type == "text"),
            calls=[(use.id, use.name, use.input) for use in uses],
            why=_WHY[reply.stop_reason],
            num_written=reply.usage.output_tokens,
            items=[{"role": "assistant", "content": reply.content}],
            parts=parts,
        )

    def result(self, call_id: str, text: str) -> Any:
        return user([{"type": "tool_result", "tool_use_id": call_id, "content": text}])


APIS: dict[str, Api] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}
