"""The forms of models' tool calls and thinking, and the answers that a request forces: a call in
one of these forms, or text of a grammar.

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

TAGS = "tags"
"""The form of thinking that is read here."""
_BEGIN = "<think>"
THOUGHT = "</think>"
"""The end of thinking in the form TAGS."""
_ANY: Json = {"type": "object"}
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
_MARKS = {form["name"]: form["mark"] for form in TABLE["thinking"]}


def form_of(template: str, parser: str = "") -> ToolForm:
    """Return the form that a chat template shows, or the form of a parser."""
    fitting = [form for form in FORMS if all(mark in template for mark in form.marks)]
    if not parser:
        return fitting[0]
    # Two forms of one parser differ in the start of a call, which the marks tell apart.
    named = (form for form in (*fitting, *FORMS) if form.name == parser)
    return next(named, ToolForm(name=parser))


def thinking_form(template: str, parser: str = "") -> str:
    """Return the form of a model's thinking: TAGS, the name of a parser, or "" without thinking.

    parser: as the configuration names it.
    """
    found = [name for name, mark in _MARKS.items() if mark in template]
    own = TAGS if THOUGHT in template else ""
    return parser or next(iter(found), own)


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


def schema_of(form: Json | None) -> Json | None:
    """Return the JSON schema that an answer must fit; None = it is text. Raises Refused."""
    form = form or {"type": "text"}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY
    # Chat completions have the schema inside of `json_schema`, the other forms do not.
    schema = form.get("json_schema", form).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise Refused(
            f"an answer of the form {kind!r} is not supported; send text, json_object, or"
            " json_schema with a schema"
        )
    return schema


def grammar_of(
    schema: Json | None, tools: Sequence[Any], forced: Sequence[Any], form: ToolForm, start: str
) -> str:
    """Return the grammar of the text that the policy writes after `start`; empty without a limit.
    Raises Refused.

    tools, forced, start: as `chosen` returns them.
    """
    if not tools:
        return "" if schema is None else _json(schema)
    if not forced and schema is None:
        return ""
    if form != HERMES:
        if forced:
            return ""
        raise Refused(
            f"an answer that may be a tool call or fit a schema is not possible with this"
            f" model, whose tool calls have the form {form.name}; leave one of them out"
        )
    ways = [_call(tool["function"], start) for tool in forced or tools]
    if schema is not None and not forced:
        ways.append({"type": "json_schema", "json_schema": schema})
    return _json({"type": "structural_tag", "format": {"type": "or", "elements": ways}})


def _call(function: Json, start: str) -> Json:
    """Return the rest of a call in the form HERMES after its start."""
    begin = HERMES.begin("", function["name"]).removeprefix(start)
    rest = [
        {"type": "json_schema", "json_schema": function.get("parameters") or _ANY},
        {"type": "const_string", "value": "}\n</tool_call>"},
    ]
    if begin:
        rest.insert(0, {"type": "const_string", "value": begin})
    return {"type": "sequence", "elements": rest}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


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
