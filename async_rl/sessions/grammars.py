"""The grammars of answers that a request forces: a JSON schema, tool calls, or either.

A grammar is of the text that the policy writes, so without the text that starts the answer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.schemas import require_applied
from async_rl.core.support import Support
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


def checked(support: Support) -> Support:
    """Return the support of an answer. Raises Refused if answers need not fit its schema."""
    try:
        require_applied(support)
    except DataError as error:
        raise Refused(str(error)) from error
    return support


def grammar_of(
    schema: Json | None, tools: Sequence[Any], choice: Any, form: ToolForm, start: str
) -> str:
    """Return the grammar of an answer; empty without a limit. Raises Refused.

    choice, start: as `chosen` takes and returns them.
    """
    is_forced = choice not in (None, "auto", "none")
    if not tools:
        return "" if schema is None else _json(schema)
    if schema is None and not is_forced:
        return ""
    if form != HERMES and is_forced:
        return ""
    if form != HERMES:
        raise Refused(
            f"an answer that may be a tool call or fit a schema is not possible with this"
            f" model, whose tool calls have the form {form.name}; leave one of them out"
        )
    if isinstance(choice, dict):
        name = choice.get("function", choice).get("name")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    ways = [_call(tool["function"], start) for tool in tools]
    if schema is not None and not is_forced:
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
