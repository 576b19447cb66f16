"""POST /v1/completions: a prompt of text or of token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from async_rl.sessions.chat import Chat
from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    new_id,
    read,
    refuse_unless,
    require_model,
)
from async_rl.sessions.forms.openai_chat import Count, stops_of, usage_of
from async_rl.sessions.session import Answer, Call, Session
from async_rl.sessions.worker import MODEL


class TextRequest(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored."""

    model: str
    prompt: str | list[Any]
    max_tokens: Count | None = 16
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = 1
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


def completions(body: bytes, session: Session) -> Exchange:
    """Read a request of completions. Several prompts have their answers in order."""
    request = read(body, TextRequest)
    require_model(request.model)
    refuse_unless(not request.echo, "echo")
    refuse_unless(not request.suffix, "suffix")
    refuse_unless(request.best_of in (None, request.n), "best_of")
    refuse_unless((request.logprobs or 0) <= 1, "logprobs above 1")
    prompts = request.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    calls = []
    for prompt in prompts:
        if isinstance(prompt, str):
            context = session.chat.text_context(session.record, prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            context = session.record.match_ids(_token_ids(prompt))
        else:
            raise Refused(400, "a prompt is neither text nor a list of token ids")
        if not len(context.token_ids):
            raise Refused(400, "a prompt is empty; send at least one token")
        call = Call(
            context=context,
            max_tokens=request.max_tokens,
            stops=stops_of(request.stop),
            in_pieces=bool(request.stream),
            prompt=prompt if isinstance(prompt, str) else "",
        )
        calls += [call] * (request.n or 1)
    if not calls:
        raise Refused(400, "the request has no prompt; send at least one")
    return _TextExchange(request, calls, session.chat)


def _token_ids(prompt: list[int]) -> Any:
    ids = np.array(prompt, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31:
        raise Refused(400, f"token ids are {ids.min()} to {ids.max()}; send ids of the vocabulary")
    return ids.astype(np.int32)


class _TextExchange:
    def __init__(self, request: TextRequest, calls: list[Call], chat: Chat) -> None:
        self.calls = calls
        self.is_streamed = bool(request.stream)
        self._request = request
        self._chat = chat
        head = {"id": new_id("cmpl-"), "object": "text_completion", "model": MODEL}
        self._head = {**head, "created": int(time.time())}

    def reply(self, answers: Sequence[Answer]) -> Any:
        choices = [self._choice(index, answer.text, answer) for index, answer in enumerate(answers)]
        return {**self._head, "choices": choices, "usage": usage_of(answers)}

    def opened(self) -> list[Event]:
        return []

    def part(self, index: int, text: str) -> list[Event]:
        return [("", {**self._head, "choices": [self._choice(index, text)]})] if text else []

    def done(self, index: int, answer: Answer) -> list[Event]:
        return [("", {**self._head, "choices": [self._choice(index, "", answer)]})]

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        if not (self._request.stream_options or {}).get("include_usage"):
            return [("", "[DONE]")]
        usage = {**self._head, "choices": [], "usage": usage_of(answers)}
        return [("", usage), ("", "[DONE]")]

    def _choice(self, index: int, text: str, answer: Answer | None = None) -> dict[str, Any]:
        logprobs = why = None
        if answer is not None:
            why = answer.why
            if self._request.logprobs is not None:
                logprobs = self._logprobs(answer)
        return {"index": index, "text": text, "finish_reason": why, "logprobs": logprobs}

    def _logprobs(self, answer: Answer) -> Any:
        tokens = [self._chat.decode(t[None], with_special=True) for t in answer.written.token_ids]
        ends = np.cumsum([0, *map(len, tokens)])[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": answer.written.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": ends.tolist(),
        }
