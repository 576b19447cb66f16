"""Messages and tools as tokens, and the policy's tokens as messages.

Invariant: of a request that repeats recorded history only the text after the recorded answer is
tokenized. The text is what the chat template writes after that answer, whatever it writes before.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError

from async_rl.core.types import IntArray
from async_rl.sessions.record import Context, History, Record
from async_rl.sessions.refusals import Refused

Message = Mapping[str, Any]
"""role, content (text) and, of an assistant, tool_calls with arguments as a dict."""
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""The form in which Hermes and Qwen models call a tool: a JSON object between these marks."""
_CALL = re.compile(rf"{CALL_BEGIN}\s*(.*?)\s*(?:{CALL_END}|\Z)", re.DOTALL)
# No template and no tokenizer changes these letters, and no message contains them.
_MARK = "ANSWER" + secrets.token_hex(8)


class Chat:
    """A tokenizer and its chat template.

    Without a template a message is its text on separate lines, and the end token ends an answer,
    as in the prompts of such a model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def context(
        self, record: Record, messages: Sequence[Message], tools: Sequence[Any], *, begin: str = ""
    ) -> tuple[Context, History]:
        """Return the context of a request and the key of its history.

        begin: text with which the answer has to begin. Raises Refused if the template refuses the
        messages.
        """
        history = (key_of(list(tools)), *(key_of(message) for message in messages))
        parent, num_matching = record.match(history)
        if parent is None:
            text = self._render(messages, tools) + begin
            return record.context(None, self._encode(text, is_beginning=True)), history
        # The recorded answer is the last of the matching messages; the first entry is the tools'.
        before = list(messages[: num_matching - 2])
        after = messages[num_matching - 1 :]
        marked = [*before, {"role": "assistant", "content": _MARK}, *after]
        text = self._render(marked, tools).rpartition(_MARK)[2] + begin
        answer = record.path(parent)
        end = self.decode(answer[-1:], with_special=True)
        if not record.is_truncated(parent):
            text = text.removeprefix(end)
        return record.context(parent, self._encode(text, is_beginning=False)), history

    def text_context(self, record: Record, text: str) -> Context:
        """Return the context of a prompt that is plain text."""
        parent = record.match_text(text)
        if parent is None:
            return record.context(None, self._encode(text, is_beginning=True))
        turn = record.turn(parent)
        assert turn.answer is not None, "only served turns are continued"
        ids = turn.answer.token_ids
        # With the text at which the answer was stopped, if the agent repeats that too.
        whole = turn.prompt + self.decode(ids)
        shown = whole if text.startswith(whole) else turn.text
        num_kept = self._num_shown(ids, shown.removeprefix(turn.prompt))
        if num_kept is None:
            return record.context(None, self._encode(text, is_beginning=True))
        rest = self._encode(text.removeprefix(shown), is_beginning=False)
        return record.context(parent, rest, num_kept=num_kept)

    def _num_shown(self, token_ids: IntArray, text: str) -> int | None:
        """The fewest leading tokens with this text, so without an end token; None if no number of
        tokens has it.
        """
        counts = range(len(token_ids) + 1)
        return next((n for n in counts if self.decode(token_ids[:n]) == text), None)

    def decode(self, token_ids: IntArray, *, with_special: bool = False) -> str:
        """Return the text of tokens."""
        ids = token_ids.tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=not with_special))

    def _encode(self, text: str, *, is_beginning: bool) -> list[int]:
        # A chat template writes the special tokens itself.
        add = is_beginning and not self._tokenizer.chat_template
        ids: list[int] = self._tokenizer(text, add_special_tokens=add)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        if not self._tokenizer.chat_template:
            return "".join(self._plain(message) for message in messages)
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        # A template is a program, which may fail on messages that its author did not think of.
        except (TemplateError, ValueError, TypeError) as error:
            raise Refused(
                400, f"the model's chat template refuses these messages: {error}"
            ) from error
        return str(rendered)

    def _plain(self, message: Message) -> str:
        text = str(message["content"])
        if message["role"] == "assistant":
            return text + str(self._tokenizer.eos_token or "")
        return text if text.endswith("\n") else text + "\n"


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def key_of(value: Any) -> str:
    """Return the key under which a message or the tools are recognized in a later request."""
    if not isinstance(value, list) and value["role"] == "assistant":
        # Clients drop the space around an answer, write no content as null or as an empty string,
        # and give tool calls new ids.
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in calls_of(value)]
        value = ["assistant", value["content"].strip(), calls]
    return json.dumps(value, sort_keys=True)


def calls_of(message: Message) -> Sequence[Any]:
    """Return the tool calls of a message."""
    calls: Sequence[Any] = message.get("tool_calls") or ()
    return calls


def parse_answer(text: str) -> dict[str, Any]:
    """Return the policy's text as an assistant message, tool calls parsed.

    A call that is not a JSON object with a name remains text: the agent sees what the policy wrote.
    """
    calls = []
    for match in _CALL.finditer(text):
        try:
            written = msgspec.json.decode(match[1], type=_WrittenCall)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return {"role": "assistant", "content": text}
        call = {"type": "function", "function": msgspec.to_builtins(written)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", **call})
    if not calls:
        return {"role": "assistant", "content": text}
    content = text[: text.index(CALL_BEGIN)].rstrip()
    return {"role": "assistant", "content": content, "tool_calls": calls}
