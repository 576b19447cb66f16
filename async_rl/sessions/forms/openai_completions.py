"""POST /v1/chat/completions, and /v1/completions with a prompt of text or of token ids.

The sampling of a request (temperature, top_p, seed, penalties) is ignored: the run's configuration
sets the distribution of the samples, because that distribution is trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from async_rl.core.types import IntArray
from async_rl.sessions.chat import Chat
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.forms.form import (
    Count,
    Event,
    Exchange,
    History,
    Request,
    json_of,
    new_id,
    read_request,
    refuse,
    refuse_unless,
)
from async_rl.sessions.session import Answer, Call, Session
from async_rl.sessions.tools import calls_of, tool_call


class _CompletionRequest(Request, kw_only=True):
    """The fields of both APIs."""

    stop: str | list[str] | None = None
    stream_options: Json | None = None
    # The limit of OpenAI's API.
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = 1
    logprobs: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that stop an answer."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or []))


class ChatRequest(_CompletionRequest, kw_only=True):
    """A request of chat completions."""

    messages: Annotated[list[Json], msgspec.Meta(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: Json | None = None
    logit_bias: dict[str, float] | None = None


class TextRequest(_CompletionRequest, kw_only=True):
    """A request of completions."""

    prompt: str | list[Any]
    # The default of OpenAI's API for completions, and only there.
    max_tokens: Count | None = 16
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


def chat_completions(body: bytes, session: Session) -> Exchange:
    """Read a request of chat completions."""
    request = read_request(body, ChatRequest)
    refuse(request, "top_logprobs", "logit_bias")
    form = (request.response_format or {"type": "text"}).get("type")
    refuse_unless(form == "text", f"response_format={form}")
    history = History()
    for message in request.messages:
        history.add(message.get("role"), message.get("content"), message.get("tool_call_id"))
        for call in calls_of(message):
            function = call["function"]
            history.add_call(call.get("id"), function["name"], function.get("arguments"))
    asked = session.chat_call(
        history.messages,
        request.tools or [],
        request.tool_choice,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stops=request.stops,
        is_streamed=bool(request.stream),
    )
    return _ChatExchange(
        # Each answer is a call; the calls read one prefill through the engine's prefix cache.
        request,
        [asked] * (request.n or 1),
        session.chat,
        "chatcmpl-",
        "chat.completion.chunk",
    )


def completions(body: bytes, session: Session) -> Exchange:
    """Read a request of completions. Several prompts have their answers in order."""
    request = read_request(body, TextRequest)
    refuse(request, "echo", "suffix")
    refuse_unless(request.best_of in (None, request.n), "best_of")
    refuse_unless((request.logprobs or 0) <= 1, "logprobs above 1")
    prompts = request.prompt
    # A list of ids is one prompt; a list of texts or of lists is several.
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    calls = []
    for prompt in prompts:
        if isinstance(prompt, str):
            context = session.chat.text_context(session.record, prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            context = session.record.match_ids(_token_ids(prompt))
        else:
            raise Refused("a prompt is neither text nor a list of token ids")
        # An engine continues at least one token.
        if not len(context.token_ids):
            raise Refused("a prompt is empty; send at least one token")
        call = Call(
            context=context,
            max_tokens=request.max_tokens,
            stops=request.stops,
            in_pieces=bool(request.stream),
            prompt=prompt if isinstance(prompt, str) else "",
        )
        calls += [call] * (request.n or 1)
    if not calls:
        raise Refused("the request has no prompt; send at least one")
    return _TextExchange(request, calls, session.chat, "cmpl-", "text_completion")


def _token_ids(prompt: list[int]) -> IntArray:
    # First as int64: int32 would wrap an id that is too large into a valid one.
    ids = np.array(prompt, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31:
        raise Refused(f"token ids are {ids.min()} to {ids.max()}; send ids of the vocabulary")
    return ids.astype(np.int32)


class _TextExchange(Exchange):
    """Answers as the choices of /v1/completions. chunk: `object` in the events of a stream."""

    def __init__(
        self, request: _CompletionRequest, calls: list[Call], chat: Chat, prefix: str, chunk: str
    ) -> None:
        super().__init__(request, calls, id=new_id(prefix), created=int(time.time()))
        self._has_usage = bool((request.stream_options or {}).get("include_usage"))
        # Completions write 0 for log-probs without alternatives.
        self._has_logprobs = request.logprobs is not None and request.logprobs is not False
        self._chat = chat
        self._chunk = {**self._head, "object": chunk}

    def reply(self, answers: Sequence[Answer]) -> Any:
        choices = [
            self._choice(index, self._whole(answer), answer) for index, answer in enumerate(answers)
        ]
        return {**self._chunk, "choices": choices, "usage": _usage(answers)}

    def text(self, index: int, text: str, *, is_first: bool) -> list[Event]:
        return [self._event(index, self._part(text))]

    def done(self, index: int, answer: Answer) -> list[Event]:
        return [self._event(index, self._part(""), answer)]

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        # OpenAI sends the usage of a stream only if the request wants it, without choices.
        usage = {**self._chunk, "choices": [], "usage": _usage(answers)}
        return [*([("", usage)] if self._has_usage else []), ("", "[DONE]")]

    def _event(self, index: int, content: Json, answer: Answer | None = None) -> Event:
        return "", {**self._chunk, "choices": [self._choice(index, content, answer)]}

    def _choice(self, index: int, content: Json, answer: Answer | None) -> Json:
        """Return a part of an answer, or the answer; only the last part has its end."""
        end: Json = {"finish_reason": None, "logprobs": None}
        if answer is not None:
            end["finish_reason"] = answer.why
            if self._has_logprobs:
                ids = answer.written.token_ids
                tokens = [self._chat.decode(token[None], with_special=True) for token in ids]
                end["logprobs"] = self._logprobs(tokens, answer.written.logprobs.tolist())
        return {"index": index, **content, **end}

    def _whole(self, answer: Answer) -> Json:
        return self._part(answer.text)

    def _part(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, tokens: list[str], logprobs: list[float]) -> Json:
        starts = np.cumsum([0, *map(len, tokens)])[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": starts.tolist(),
        }


class _ChatExchange(_TextExchange):
    """Answers as messages, whose parts are deltas."""

    def reply(self, answers: Sequence[Answer]) -> Any:
        return {**super().reply(answers), "object": "chat.completion"}

    def opened(self) -> list[Event]:
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, {"delta": delta}) for index in range(len(self.calls))]

    def done(self, index: int, answer: Answer) -> list[Event]:
        # Clients put the parts of a streamed call together by this index.
        calls = [{"index": number, **call} for number, call in enumerate(_calls(answer))]
        events = [self._event(index, {"delta": {"tool_calls": calls}})] if calls else []
        return [*events, *super().done(index, answer)]

    def _whole(self, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.content, "refusal": None}
        calls = _calls(answer)
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _part(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: list[str], logprobs: list[float]) -> Json:
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _calls(answer: Answer) -> list[Json]:
    return [tool_call(call["id"], call["function"]["name"], json_of(call)) for call in answer.calls]


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = answers[0].num_prompt_tokens
    written = sum(len(answer.written.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
