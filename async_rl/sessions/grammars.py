"""The grammars of answers that a request forces: a JSON schema, tool calls, or either.

A grammar is of the text that the policy writes, so without the text that starts the answer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.tools import HERMES, ToolForm

_ANY: Json = {"type": "object"}


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
    """Return the grammar of an answer; empty without a limit. Raises Refused.

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
