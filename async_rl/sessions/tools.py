"""The forms of models' tool calls and thinking, and the call in each form that a request forces.

A form is recognized by marks in the chat template. Answers in the form HERMES are read here, the
others by vLLM's parser of the same name in a generator, which has imported vLLM anyway: a gateway
that imports it needs seven times its memory. Of thinking, `<think>...</think>` is read here, and
other forms like tool calls. Pure.
"""

import re
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.frozen import frozen
from async_rl.sessions.errors import Json, Refused

# Of calls: the policy writes anything, deep nesting and half of a surrogate pair too.
_BAD_CALL = (msgspec.DecodeError, UnicodeEncodeError, RecursionError)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@frozen
class ToolForm:
    """One form. name: of vLLM's parser. marks: a template with all of them has this form.

    required, named: the start of an answer that has to call a tool, or the tool
    {name} ({json} in JSON); without them no call can be forced. end: the text after a call; without
    it several calls cannot be refused.
    """

    name: str
    marks: Sequence[str] = ()
    required: str = ""
    named: str = ""
    end: str = ""

    def begin(self, choice: str, name: str = "") -> str:
        """Return the text that starts a forced call. Raises Refused."""
        begin = self.named if name else self.required
        if not begin:
            raise Refused(
                f"tool_choice={choice} is not possible with this model, whose tool calls have the"
                f" form {self.name}; leave it out, or set auto or none",
            )
        return begin.replace("{json}", msgspec.json.encode(name).decode()).replace("{name}", name)

    def single(self) -> tuple[str, ...]:
        """Return the texts that stop an answer after its first call. Raises Refused."""
        if not self.end:
            raise Refused(
                f"parallel_tool_calls=false is not possible with this model, whose tool calls have"
                f" the form {self.name}; leave it out"
            )
        return (self.end,)


TABLE = tomllib.loads(Path(__file__).with_name("tool_forms.toml").read_text())
# The first that fits, so a form comes before those whose marks it has too.
FORMS = tuple(ToolForm(**form) for form in TABLE["form"])
HERMES = FORMS[-1]
"""A JSON object between marks, as Hermes and Qwen models write it."""


def form_of(template: str, parser: str = "") -> ToolForm:
    """Return the form that a chat template shows, or the form of a parser."""
    fitting = [form for form in FORMS if all(mark in template for mark in form.marks)]
    if not parser:
        return fitting[0]
    # Two forms of one parser differ in the start of a call, which the marks tell apart.
    named = (form for form in (*fitting, *FORMS) if form.name == parser)
    return next(named, ToolForm(name=parser))


def chosen(
    tools: list[Json], choice: str | Json | None, form: ToolForm
) -> tuple[list[Json], list[Json], str]:
    """Return the tools that the template shows, those of which one has to be called, and the text
    that starts the answer.

    A choice other than `auto` is kept by starting the answer for the policy; that text is read,
    not trained. Raises Refused.
    """
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools, [], ""
    if choice == "required" and tools:
        return tools, tools, form.begin(choice)
    if isinstance(choice, dict):
        # Chat completions have the name inside of `function`, the other forms do not.
        name = choice.get("function", choice).get("name")
        if forced := [tool for tool in tools if tool["function"]["name"] == name]:
            return tools, forced, form.begin(str(choice), str(name))
    raise Refused(f"tool_choice={choice} names none of the {len(tools)} tools")


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def calls_of(message: Json) -> Sequence[Any]:
    """Return the tool calls of a message."""
    calls: Sequence[Any] = message.get("tool_calls") or ()
    return calls


def tool_call(call_id: str, name: str, arguments: Any) -> Json:
    """Return a tool call as messages of a chat template have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def json_of(call: Any) -> str:
    """Return the arguments of a tool call as JSON text."""
    return msgspec.json.encode(call["function"]["arguments"]).decode()


def as_text(text: str) -> Json:
    """Return an answer without tool calls as a message."""
    return {"role": "assistant", "content": text}


def assistant(text: str, content: str, calls: Sequence[tuple[str, str, str | bytes]]) -> Json:
    """Return an answer as a message. calls: the id, the name and the JSON arguments of each.

    Without calls, and if the arguments of one are not a JSON object, it is the whole text: the
    agent sees the policy's text.
    """
    read = []
    for call_id, name, arguments in calls:
        try:
            value = msgspec.json.decode(arguments, type=Json)
        except _BAD_CALL:
            return as_text(text)
        read.append(tool_call(call_id or f"call_{secrets.token_hex(12)}", name, value))
    if not read:
        return as_text(text)
    return {**as_text(content), "tool_calls": read}


def parse_answer(text: str) -> Json:
    """Return the policy's text as an assistant message, tool calls in the form HERMES parsed.

    A call that is not a JSON object with a name remains text.
    """
    written = [match[1] for match in _CALL.finditer(text)]
    try:
        read = [msgspec.json.decode(call, type=_WrittenCall) for call in written]
    except _BAD_CALL:
        return as_text(text)
    calls = [("", call.name, bytes(call.arguments)) for call in read]
    return assistant(text, text.partition("<tool_call>")[0].rstrip(), calls)


# ---- thinking

TAGS = "tags"
"""The form that is read here."""
_BEGIN = "<think>"
THOUGHT = "</think>"
"""The end of thinking in this form."""
_MARKS = {form["name"]: form["mark"] for form in TABLE["thinking"]}


def thinking_form(template: str, parser: str = "") -> str:
    """Return the form of a model's thinking: TAGS, the name of a parser, or "" without thinking.

    parser: the one that the configuration names.
    """
    found = [name for name, mark in _MARKS.items() if mark in template]
    own = TAGS if THOUGHT in template else ""
    return parser or next(iter(found), own)


def is_begun(text: str) -> bool:
    """Return whether a template has begun the thinking at the end of a prompt."""
    return text.rstrip().endswith(_BEGIN)


def split(text: str, *, begun: bool) -> tuple[str, str]:
    """Return the thinking and the rest of an answer. begun: by the template."""
    written = text.lstrip()
    if not begun and not written.startswith(_BEGIN):
        return "", text
    thinking, end, rest = written.removeprefix(_BEGIN).partition(THOUGHT)
    return thinking.strip(), rest.lstrip() if end else ""
