"""The real, unchanged packages `openai` and `anthropic` as clients of an endpoint, in one form."""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

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
# Each client would read the machine's certificates for 0.06 s, and no test needs them.
_TLS = ssl.create_default_context()
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
    headers = {"authorization": f"Bearer {key}"}
    how: Any = {"api_key": key, "max_retries": 0}
    http_of, claude_of = openai.DefaultAsyncHttpxClient, anthropic.DefaultAsyncHttpxClient
    async with (
        endpoint(session) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", http_client=http_of(verify=_TLS), **how) as chat,
        anthropic.AsyncAnthropic(base_url=url, http_client=claude_of(verify=_TLS), **how) as claude,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=_TLS) as http,
    ):
        yield Clients(openai=chat, claude=claude, http=http)


@contextlib.asynccontextmanager
async def using(
    texts: Iterable[str] = (), template: str = CHATML, **options: Any
) -> AsyncIterator[tuple[Clients, Session, Policy]]:
    """A session in use, whose policy writes these texts."""
    session, policy = open_session(template, texts, **options)
    async with clients(session) as found:
        yield found, session, policy


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


@frozen
class Api:
    """One API. calls: of a client; fields: of a history, the most tokens and the system prompt;
    delta: the event of a stream with text, and its field; final: returns the whole answer; read:
    a Reply without parts; result: of a tool with this call's id, as an item of a history.
    """

    calls: Callable[[Clients], Any]
    fields: tuple[str, str, str]
    tool: Any
    delta: tuple[str, str]
    final: str
    read: Callable[[Any], dict[str, Any]]
    result: Callable[[str, str], Any]

    async def ask(
        self,
        found: Clients,
        history: Sequence[Any],
        *,
        stream: bool = False,
        system: str = "",
        tools: bool = False,
        most: int = 900,
        **more: Any,
    ) -> Reply:
        """Send a history. most: tokens; more: fields of the request."""
        messages, limit, prompt = self.fields
        how: Any = {"model": "policy", messages: list(history), limit: most, **more}
        how |= {"tools": [self.tool]} if tools else {}
        if system and prompt:
            how[prompt] = system
        elif system:
            how[messages].insert(0, {"role": "system", "content": system})
        if not stream:
            return Reply(**self.read(await self.calls(found).create(**how)), parts=[])
        if not prompt:
            how["stream_options"] = {"include_usage": True}
        kind, field = self.delta
        async with self.calls(found).stream(**how) as events:
            shown = [event async for event in events]
            reply = await getattr(events, self.final)()
        if kind.startswith("response."):
            assert [event.sequence_number for event in shown] == list(range(len(shown)))
        parts = [getattr(event, field) for event in shown if event.type == kind]
        return Reply(**self.read(reply), parts=parts)


def _read_chat(reply: Any) -> dict[str, Any]:
    (choice,) = reply.choices
    calls = [(call.id, call.function) for call in choice.message.tool_calls or []]
    return {
        "text": choice.message.content or "",
        "calls": [(name, called.name, json.loads(called.arguments)) for name, called in calls],
        "why": choice.finish_reason,
        "num_written": reply.usage.completion_tokens,
        # The whole message with its null fields, as the package returns it.
        "items": [choice.message],
    }


def _read_response(reply: Any) -> dict[str, Any]:
    calls = [item for item in reply.output if item.type == "function_call"]
    is_cut = reply.status == "incomplete"
    why = _WHY[reply.incomplete_details.reason] if is_cut else "stop"
    return {
        "text": reply.output_text,
        "calls": [(call.call_id, call.name, json.loads(call.arguments)) for call in calls],
        "why": "tool_calls" if calls and not is_cut else why,
        "num_written": reply.usage.output_tokens,
        "items": reply.output,
    }


def _read_message(reply: Any) -> dict[str, Any]:
    uses = [block for block in reply.content if block.type == "tool_use"]
    return {
        "text": "".join(block.text for block in reply.content if block.type == "text"),
        "calls": [(use.id, use.name, use.input) for use in uses],
        "why": _WHY[reply.stop_reason],
        "num_written": reply.usage.output_tokens,
        "items": [{"role": "assistant", "content": reply.content}],
    }


APIS = {
    "chat": Api(
        calls=lambda found: found.openai.chat.completions,
        fields=("messages", "max_tokens", ""),
        tool=TOOL,
        delta=("content.delta", "delta"),
        final="get_final_completion",
        read=_read_chat,
        result=lambda call, text: {"role": "tool", "tool_call_id": call, "content": text},
    ),
    "responses": Api(
        calls=lambda found: found.openai.responses,
        fields=("input", "max_output_tokens", "instructions"),
        tool=FUNCTION,
        delta=("response.output_text.delta", "delta"),
        final="get_final_response",
        read=_read_response,
        result=lambda call, text: {"type": "function_call_output", "call_id": call, "output": text},
    ),
    "messages": Api(
        calls=lambda found: found.claude.messages,
        fields=("messages", "max_tokens", "system"),
        tool=CLAUDE,
        delta=("text", "text"),
        final="get_final_message",
        read=_read_message,
        result=lambda call, text: user(
            [{"type": "tool_result", "tool_use_id": call, "content": text}]
        ),
    ),
}
