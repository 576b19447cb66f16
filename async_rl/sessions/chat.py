"""Messages and tools as tokens, and the policy's tokens as messages.

Invariant: of a request that repeats recorded history only the text after the recorded answer is
tokenized. The text is what the chat template writes after that answer, whatever it writes before.
"""

import bisect
import functools
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from jinja2 import TemplateError

from async_rl.core.types import IntArray
from async_rl.protocol.generator import CallsRead, Completion, ReadCalls
from async_rl.sessions.calls import Call, Context
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.record import Record, following
from async_rl.sessions.tools import (
    HERMES,
    TAGS,
    THOUGHT,
    as_text,
    assistant,
    calls_of,
    form_of,
    is_begun,
    parse_answer,
    split,
    thinking_form,
    tool_call,
)

Message = Json
"""role, content (text) and, if the role is assistant, reasoning_content (text) and tool_calls with
arguments as a dict.
"""
Reader = Callable[[ReadCalls], Awaitable[CallsRead]]
"""Lets a generator read the tool calls of an answer."""
_PART_CHARS = 1 << 17
"""A longer text is counted in parts first, up to the limit: for 15 MB a tokenizer takes a minute,
and then Python's lock for a second, in which no other call advances.
"""
_PROMPT_END = 16
"""Tokens that have the tag with which a template begins the thinking."""
# No template and no tokenizer changes these letters, and no message contains them.
_MARK = "ANSWER" + secrets.token_hex(8)


class Chat:
    """A tokenizer and its chat template.

    Without a template a message is its text on separate lines, and an answer closes with the end
    token, as in the prompts of such a model. parser: of the tool calls, thinking: of the thinking,
    if the template does not show their form; read: reads forms other than HERMES and TAGS.
    """

    def __init__(
        self, tokenizer: Any, parser: str = "", thinking: str = "", *, read: Reader | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._read = read
        template = tokenizer.chat_template or ""
        # A model may have several, by name.
        texts = template.values() if isinstance(template, dict) else [template]
        self._template = "".join(texts)
        self.form = form_of(self._template, parser)
        self._thinking = thinking_form(self._template, thinking)
        self.text_of_token = functools.cache(self._text_of_token)
        """Returns the text of a token. Cached: an answer may have thousands of alternatives."""

    def context(
        self,
        record: Record,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        limit: int,
        start: str = "",
        variables: Json | None = None,
    ) -> tuple[Context, bytes]:
        """Return the context of a request and the digest of its history.

        limit: the most tokens. start: text that has to open the answer; variables: those that the
        template does not read are left out. Raises Refused if the template refuses the messages,
        or if they are far above the limit.
        """
        given = variables or {}
        known = {name: given[name] for name in given if name in self._template}
        keys = [key_of([*tools, known]), *map(key_of, messages)]
        _, *beginnings = itertools.accumulate(keys, following, initial=b"")
        history = beginnings[-1]
        shown = {**known, "tools": list(tools) or None}
        parent, num_matching = record.match(beginnings)
        if parent is None:
            text = self._render(messages, shown) + start
            return record.context(None, self._encode(text, limit, is_beginning=True)), history
        # The recorded answer is the last of the matching messages; the first entry is the tools'.
        text = self._text_after(messages, num_matching - 2, shown) + start
        answer = record.turns[parent].answer
        if not answer.is_truncated:
            text = text.removeprefix(self.decode(answer.token_ids[-1:], with_special=True))
        return record.context(parent, self._encode(text, limit)), history

    def _text_after(self, messages: Sequence[Message], at: int, shown: Json) -> str:
        """Return the text that the template writes after the answer `at`."""
        marked = [*messages[:at], {"role": "assistant", "content": _MARK}, *messages[at + 1 :]]
        try:
            return self._render(marked, shown).rpartition(_MARK)[2]
        except Refused:
            # Some templates refuse the result of a tool without its call before it.
            begin = self._render(messages[: at + 1], shown, is_whole=False)
            whole = self._render(messages, shown)
            if not whole.startswith(begin):
                raise
            return whole.removeprefix(begin)

    async def message_of(self, call: Call, written: Completion, text: str, *, is_cut: bool) -> Json:
        """Return an answer as a message, its tool calls and thinking read. is_cut: by a limit.
        Raises Refused or ConfigError if no generator can ever read it, InfrastructureError if none
        answers.
        """
        if not call.history:
            # The agent reads all of it as text, and repeats it as text.
            return as_text(text)
        thinking = ""
        shown = call.start + text
        if self._thinking == TAGS and not call.support.grammar:
            end = self.decode(call.context.token_ids[-_PROMPT_END:], with_special=True)
            thinking, shown = split(shown, begun=not call.start and is_begun(end))
        # A parser would complete a call that the limit has cut.
        has_calls = bool(call.tools) and not is_cut
        reader = "" if self._thinking == TAGS else self._thinking
        if not reader and (self.form == HERMES or not has_calls):
            return {**parse_answer(shown), **thought(thinking)}
        if self._read is None:
            raise Refused(f"answers of the form {self.form.name} cannot be read here")
        ids = written.token_ids
        whole = self.decode(ids if written.is_truncated else ids[:-1], with_special=True)
        whole = before_stop(whole, call.stops)[0]
        if thinking:
            whole = whole.rpartition(THOUGHT)[2]
        start = self._encode(call.start, len(call.start))
        request = ReadCalls(
            parser=self.form.name if has_calls else "",
            thinking=reader,
            text=call.start + whole,
            token_ids=np.append(start, ids).astype("int32"),
            tools=msgspec.json.encode(call.tools),
        )
        found = await self._read(request)
        text = found.content if found.thinking else shown
        thinking = found.thinking or thinking
        return {**assistant(text, found.content, found.calls), **thought(thinking)}

    def text_of(self, token_ids: IntArray, call: Call) -> tuple[str, int | None]:
        """Return the text before the first stop token or text, and the number of tokens up to its
        end; None = all.
        """
        num_kept = None
        if (is_stop := np.isin(token_ids, call.stop_ids)).any():
            num_kept = int(is_stop.argmax()) + 1
            token_ids = token_ids[: num_kept - 1]
        text, stop = before_stop(self.decode(token_ids), call.stops)
        if not stop:
            return text, num_kept
        counts = range(len(token_ids) + 1)
        # By halves: a long answer would be decoded once for each of its tokens.
        return text, bisect.bisect_left(
            counts, True, key=lambda count: stop in self.decode(token_ids[:count])
        )

    def text_context(self, record: Record, text: str, limit: int) -> Context:
        """Return the context of a prompt that is plain text. limit: as in `context`."""
        # A copy: the text of a large body is read on a thread.
        shown = max(filter(text.startswith, list(record.texts)), key=len, default="")
        parent, written = record.texts.get(shown, (None, ""))
        if parent is not None:
            ids = record.turns[parent].answer.token_ids
            # The least number of tokens with this text. Searched now, because few are continued.
            counts = (n for n in range(len(ids) + 1) if self.decode(ids[:n]) == written)
            if (num_kept := next(counts, None)) is not None:
                rest = self._encode(text.removeprefix(shown), limit)
                return record.context(parent, rest, num_kept=num_kept)
        return record.context(None, self._encode(text, limit, is_beginning=True))

    def decode(self, token_ids: IntArray, *, with_special: bool = False) -> str:
        """Return the text of tokens."""
        ids = token_ids.tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=not with_special))

    def further(self, stop_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the stop tokens without the end token, at which an engine stops."""
        text = str(self.tokenizer.eos_token or "")
        end = self._encode(text, len(text))
        return tuple(token for token in stop_ids if token not in end)

    def _text_of_token(self, token_id: int) -> str:
        return self.decode(np.array([token_id]), with_special=True)

    def _encode(self, text: str, limit: int, *, is_beginning: bool = False) -> list[int]:
        num_tokens = 0
        for start in range(0, len(text) if len(text) > _PART_CHARS else 0, _PART_CHARS):
            part = self.tokenizer(text[start : start + _PART_CHARS], add_special_tokens=False)
            num_tokens += len(part["input_ids"])
            # A few tokens of the whole text differ from those of its parts.
            if num_tokens > 2 * limit:
                raise Refused(
                    f"the first {start + _PART_CHARS} characters have {num_tokens} tokens; the"
                    f" limit is {limit} (data.max_response_tokens); shorten it or raise the limit",
                    code="context_length_exceeded",
                )
        # A chat template writes the special tokens itself.
        add = is_beginning and not self.tokenizer.chat_template
        ids: list[int] = self.tokenizer(text, add_special_tokens=add)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Message], shown: Json, *, is_whole: bool = True) -> str:
        """Return the text of the template, which reads `shown`. is_whole: an answer follows."""
        if not self.tokenizer.chat_template:
            return "".join(self._plain(message) for message in messages)
        render = functools.partial(
            self.tokenizer.apply_chat_template,
            **{**shown, "tokenize": False, "add_generation_prompt": is_whole},
        )
        # A template is a program, which may fail on messages that its author did not think of.
        try:
            try:
                return str(render(list(messages)))
            except TypeError:
                # Some put the arguments of calls between other texts, and so need them as text.
                return str(render([_with_text_arguments(message) for message in messages]))
        except (TemplateError, ValueError, TypeError) as error:
            raise Refused(f"the model's chat template refuses these messages: {error}") from error

    def _plain(self, message: Message) -> str:
        text = str(message["content"])
        if message["role"] == "assistant":
            return text + str(self.tokenizer.eos_token or "")
        return text if text.endswith("\n") else text + "\n"


def key_of(value: Any) -> str:
    """Return the key under which a message or the tools are recognized in a later request."""
    if not isinstance(value, list) and value["role"] == "assistant":
        # Clients drop the space around an answer, write no content as null or as an empty string,
        # and give tool calls new ids.
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in calls_of(value)]
        value = ["assistant", value["content"].strip(), calls]
    return json.dumps(value, sort_keys=True)


def thought(thinking: str) -> Json:
    """Return the field of a message that chat templates read; without thinking none."""
    return {"reasoning_content": thinking} if thinking else {}


def _with_text_arguments(message: Message) -> Message:
    calls = [
        tool_call(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]))
        for call in calls_of(message)
    ]
    return {**message, "tool_calls": calls} if calls else message


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop text, and the stop text; empty if there is none."""
    stopped = [(text.find(stop), stop) for stop in stops if stop in text]
    start, stop = min(stopped, default=(len(text), ""))
    return text[:start], stop
