"""The tools of POST /v1/responses as functions of a chat template, and their calls as items.

A tool in a namespace is shown as namespace__name. A custom tool is a function of one text, `input`;
a local shell is a function `local_shell` of a command. Tools that OpenAI runs are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.sessions.errors import Json
from async_rl.sessions.forms.form import History, function_of, refuse_unless
from async_rl.sessions.forms.parameters import HOSTED
from async_rl.sessions.tools import json_of

TEMPLATES = msgspec.json.decode(Path(__file__).with_name("responses.json").read_bytes())
"""Of responses: the fields that repeat those of a request, with their defaults, and the fixed ones;
of tools: the parameters of a custom tool, and a local shell as a function.
"""
_SHELL = TEMPLATES["local_shell"]


class Tools:
    """The tools of one request. functions: as the chat template shows them."""

    def __init__(self, tools: Sequence[Json]) -> None:
        self.functions: list[Json] = []
        self._known: dict[str, Json] = {}
        self._add(tools, {})

    def _add(self, tools: Sequence[Json], place: Json) -> None:
        """Add tools. place: the fields that their calls have next to the name."""
        for tool in tools:
            kind = str(tool.get("type"))
            if kind == "namespace":
                self._add(tool["tools"], {"namespace": tool["name"]})
            elif not kind.startswith(HOSTED):
                refuse_unless(
                    kind in ("function", "custom", "local_shell"), f"a tool of type {kind!r}"
                )
                tool = {**tool, **(_SHELL if kind == "local_shell" else {})}
                fields = {"name": tool["name"], **place}
                name = _shown(fields)
                self._known[name] = {"type": kind, **fields}
                # The grammar of a custom tool tells the policy what to write.
                about = [tool.get("description"), (tool.get("format") or {}).get("definition")]
                parameters = TEMPLATES["custom"] if kind == "custom" else tool.get("parameters")
                described = {"name": name, "description": "\n".join(filter(None, about))}
                self.functions.append(function_of(described, parameters))

    def item(self, call: Json) -> Json:
        """Return a call as an item of a response."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        known = dict(self._known.get(name) or {"type": "function", "name": name})
        kind = known.pop("type")
        # An item has an id next to the id of the call, which the result of the tool repeats.
        item = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        if kind == "local_shell":
            action = {"type": "exec", "env": {}, **arguments}
            return {"type": "local_shell_call", **item, "action": action}
        if kind == "custom":
            written = arguments.get("input")
            text = written if isinstance(written, str) else json_of(call)
            return {"type": "custom_tool_call", **item, **known, "input": text}
        return {"type": "function_call", **item, **known, "arguments": json_of(call)}


def read_call(item: Json, history: History) -> bool:
    """Add an item that is a call or its result to the history; return whether it is one."""
    kind = item["type"]
    call_id = item.get("call_id") or item.get("id")
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        history.add("tool", item.get("output"), call_id)
    elif kind == "function_call":
        history.add_call(call_id, _shown(item), item.get("arguments"))
    elif kind == "custom_tool_call":
        history.add_call(call_id, _shown(item), {"input": item["input"]})
    elif kind == "local_shell_call":
        # Packages write the fields that the policy left out as null.
        written = {key: value for key, value in item["action"].items() if key != "type" and value}
        history.add_call(call_id, _SHELL["name"], written)
    else:
        return False
    return True


def _shown(fields: Any) -> str:
    """Return the name under which the chat template shows a tool."""
    return "__".join(filter(None, [fields.get("namespace"), fields["name"]]))
