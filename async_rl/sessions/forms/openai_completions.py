"""POST /v1/chat/completions, /v1/completions with a prompt of text or of token ids, and vLLM's
/inference/v1/generate, which reads and writes token ids.

parameters.toml has their parameters.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from async_rl.core.calls import Alternatives
from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.chat import Chat, thought
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    History,
    named_token,
    new_id,
    prompt_scores,
    refuse_unless,
    scored_tokens,
    scores_by_text,
    stops_of,
    variables_of,
)
from async_rl.sessions.forms.parameters import read_request
from async_rl.sessions.session import Session
from async_rl.sessions.tools import calls_of, json_of, schema_of, tool_call

_MOST_TOKENS = 16
"""The default of OpenAI's API for completions, and only there."""


def chat_completions(body: bytes, session: Session) -> Exchange:
    """Read a request of chat completions."""
    request = read_request(body, "chat")
    history = History()
    for message in request.messages:
        history.add(
            message.get("role"),
            message.get("content"),
            message.get("tool_call_id"),
            message.get("reasoning_content"),
        )
        for call in calls_of(message):
            function = call["function"]
            history.add_call(call.get("id"), function["name"], function.get("arguments"))
    is_begun = bool(request.continue_final_message)
    refuse_unless(is_begun or request.add_generation_prompt is not False, "no generation prompt")
    for tool in request.tools or ():
        refuse_unless(tool.get("type") == "function", f"a tool of type {tool.get('type')!r}")
    asked = session.chat_call(
        history.messages,
        request.tools or [],
        request.tool_choice,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stops=stops_of(request.stop),
        is_single=request.parallel_tool_calls is False,
        prefill=history.prefill() if is_begun else "",
        variables=variables_of(request, reasoning_effort=request.reasoning_effort),
        schema=schema_of(request.response_format),
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
    )
    # Each answer is a call; the calls read one prefill through the engine's prefix cache.
    return _ChatExchange(
        request, [asked] * (request.n or 1), session.chat, num_top=request.top_logprobs
    )


def completions(body: bytes, session: Session) -> Exchange:
    """Read a request of completions. Several prompts have their answers in order."""
    request = read_request(body, "completions")
    prompts = request.prompt
    # A list of ids is one prompt; a list of texts or of lists is several.
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    # Before their tokens are looked at.
    session.require_turns(len(prompts) * (request.n or 1))
    calls = []
    for prompt in prompts:
        if isinstance(prompt, str):
            context = session.chat.text_context(session.record, prompt, session.limit)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            context = session.record.match_ids(_token_ids(prompt))
        else:
            raise Refused("a prompt is neither text nor a list of token ids")
        # An engine continues at least one token.
        if not len(context.token_ids):
            raise Refused("a prompt is empty; send at least one token")
        call = Call(
            context=context,
            max_tokens=request.max_tokens or _MOST_TOKENS,
            stops=stops_of(request.stop),
            support=session.supported(logit_bias=request.logit_bias, min_tokens=request.min_tokens),
            prompt=prompt if isinstance(prompt, str) else "",
        )
        calls += [call] * (request.n or 1)
    if not calls:
        raise Refused("the request has no prompt; send at least one")
    return _TextExchange(request, calls, session.chat, num_top=int(request.logprobs or 0))


def generate(body: bytes, session: Session) -> Exchange:
    """Read a request of token ids for token ids."""
    request = read_request(body, "generate")
    params = read_request(msgspec.json.encode(request.sampling_params), "sampling_params")
    asked = Call(
        context=session.record.match_ids(_token_ids(request.token_ids)),
        max_tokens=params.max_tokens,
        stops=stops_of(params.stop),
        stop_ids=session.chat.further(params.stop_token_ids or ()),
        support=session.supported(logit_bias=params.logit_bias, min_tokens=params.min_tokens),
    )
    both = SimpleNamespace(**{**asdict(params), **asdict(request)})
    calls = [asked] * (params.n or 1)
    return _TokenExchange(both, calls, session.chat, num_top=params.logprobs)


def _token_ids(prompt: list[int]) -> IntArray:
    # Before they are an array: int32 would wrap an id that is too large into a valid one.
    if prompt and not 0 <= min(prompt) <= max(prompt) < 1 << 31:
        raise Refused(f"token ids are {min(prompt)} to {max(prompt)}; send ids of the vocabulary")
    return np.array(prompt, np.int32)


class _TextExchange(Exchange):
    """Answers as the choices of /v1/completions. num_top: the alternatives of a token."""

    prefix = "cmpl-"
    chunk = "text_completion"
    """`object` in the events of a stream."""

    def __init__(self, request: Any, calls: list[Call], chat: Chat, *, num_top: int | None) -> None:
        alternatives = Alternatives(num_top=num_top or 0, num_prompt_top=request.prompt_logprobs)
        calls = [replace(call, alternatives=alternatives) for call in calls]
        super().__init__(
            request, calls, id=new_id(self.prefix), created=int(time.time()), object=self.chunk
        )
        self._has_usage = (request.stream_options or {}).get("include_usage")
        # Completions write 0 for log-probs without alternatives.
        is_wanted = request.logprobs is not None and request.logprobs is not False
        self._has_logprobs = is_wanted or num_top
        self._has_ids = request.return_tokens_as_token_ids
        self._returns_ids = request.return_token_ids
        self._chat = chat

    def reply(self, answers: Sequence[Answer]) -> Json:
        choices = [
            {
                "index": index,
                **self._whole(answer),
                "finish_reason": answer.why,
                "logprobs": self._logprobs(answer.written) if self._has_logprobs else None,
                **self._ids(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self.head, "choices": choices, "usage": _usage(answers)}

    def events(self, body: Json) -> list[Event]:
        parts = [part for choice in body["choices"] for part in _parts(choice)]
        chunks = [{**self.head, "choices": [part]} for part in parts]
        chunks[0] |= {name: body[name] for name in body if name.startswith("prompt_")}
        # OpenAI sends the usage of a stream only if the request wants it, without choices.
        if self._has_usage:
            chunks.append({**self.head, "choices": [], "usage": body["usage"]})
        return [*(("", chunk) for chunk in chunks), ("", msgspec.Raw(b"[DONE]"))]

    def _prompt(self, answer: Answer) -> Json:
        """Return the fields about the tokens before an answer."""
        found = prompt_scores(answer.written, self._name)
        if self._returns_ids:
            found["prompt_token_ids"] = answer.call.context.token_ids.tolist()
        return found

    def _ids(self, answer: Answer) -> Json:
        return _ids_of(answer) if self._returns_ids else {}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._has_ids else self._chat.text_of_token(token)

    def _whole(self, answer: Answer) -> Json:
        return {"text": answer.content, **self._prompt(answer)}

    def _logprobs(self, written: Completion) -> Json:
        return scores_by_text(written, self._name)


class _ChatExchange(_TextExchange):
    """Answers as messages, whose parts are deltas."""

    prefix = "chatcmpl-"
    chunk = "chat.completion.chunk"

    def reply(self, answers: Sequence[Answer]) -> Json:
        prompt = self._prompt(answers[0])
        return {**super().reply(answers), "object": "chat.completion", **prompt}

    def _whole(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.content, "refusal": None}
        message |= thought(answer.thinking)
        calls = [_wire(call) for call in answer.calls]
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _logprobs(self, written: Completion) -> Json:
        tokens = scored_tokens(written, lambda token: named_token(token, self._name))
        return {"content": tokens, "refusal": None}


class _TokenExchange(_ChatExchange):
    """Answers as token ids. Of a stream one event has an answer."""

    prefix = "generate-"
    chunk = "generate"

    def reply(self, answers: Sequence[Answer]) -> Json:
        return {**super().reply(answers), "request_id": self.head["id"]}

    def _ids(self, answer: Answer) -> Json:
        return _ids_of(answer)

    def _whole(self, answer: Answer) -> Json:
        return {}

    def _logprobs(self, written: Completion) -> Json:
        return {"content": scored_tokens(written, self._named)}

    def _named(self, token: int) -> Json:
        # vLLM 0.32 names a token by its id, earlier versions by a text with it.
        return {"token_id": token, "token": f"token_id:{token}"}


def _parts(choice: Json) -> list[Json]:
    """Return the parts in which a stream has a choice: messages come as deltas."""
    if "message" not in choice:
        return [choice]
    end = dict(choice)
    message = end.pop("message")
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        if message.get(name) is not None:
            deltas.append({name: message[name]})
    # Clients put the parts of a streamed call together by this index.
    for index, call in enumerate(calls_of(message)):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    begun = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    return [*({**begun, "delta": delta} for delta in deltas), {**end, "delta": {}}]


def _ids_of(answer: Answer) -> Json:
    """Return the tokens of an answer, and the spans of them that one version wrote."""
    versions = answer.written.versions
    ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    spans = [
        {"version": str(versions[start]), "start": start, "end": end}
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return {"token_ids": answer.written.token_ids.tolist(), "weight_versions": spans}


def _wire(call: Any) -> Json:
    return tool_call(call["id"], call["function"]["name"], json_of(call))


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = answers[0].num_prompt_tokens
    written = sum(len(answer.written.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
