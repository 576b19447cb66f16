"""The page docs/parameters.md: what the endpoint does with each parameter of each API, generated
from async_rl/sessions/forms/parameters.toml.
"""

from __future__ import annotations

from async_rl.sessions.forms.parameters import HOSTED, TABLE, Parameter
from docs.generate.settings import table

_APIS = {
    "chat": "`/v1/chat/completions`",
    "completions": "`/v1/completions`",
    "responses": "`/v1/responses`",
    "messages": "`/v1/messages`",
    "count_tokens": "`/v1/messages/count_tokens`",
    "generate": "`/inference/v1/generate`",
    "sampling_params": "`sampling_params` of `/inference/v1/generate`",
}
_TYPES = {
    "any": "any",
    "biases": "object: token id to float, -100 to 100",
    "bit": "0 or 1",
    "blocks": "text or list",
    "bool": "true, false",
    "choice": "text or object",
    "choices": "int, 1 to 128",
    "count": "int >= 1",
    "id_list": "list of int",
    "ids": "list of int, not empty",
    "least": "int >= 0",
    "messages": "list, not empty",
    "number": "float",
    "objects": "list of objects",
    "scores": "int, 0 to 20, or true, false",
    "texts": "text or list of text",
    "top": "int, 0 to 20",
}
_RULES = ("honored", "refused", "ignored")
_HEAD = """# Parameters of the endpoint

`make docs` generates this page from `async_rl/sessions/forms/parameters.toml`; edit that file. A
request of an agent is read by it: an *honored* parameter acts; a *refused* one is answered with
status 400 in the form of its API, with its name in `param`, unless its value asks for nothing
(null, false, 0, empty, or the value named here); an *ignored* one changes nothing that is sampled
or trained. A value of another type is refused, and so is any parameter that is not here.
[agents.md](agents.md) describes the endpoint.

Tools whose types begin with {hosted} are run by another service. They are left out of the prompt,
so the policy never calls them.
"""


def parameters_page() -> str:
    """The whole page."""
    parts = [_HEAD.format(hosted=", ".join(f"`{name}`" for name in HOSTED))]
    for api, path in _APIS.items():
        rows = [
            (f"`{each.name}`", _kind(each), each.rule, each.why)
            for rule in _RULES
            for each in sorted(TABLE[api], key=lambda each: each.name)
            if each.rule == rule
        ]
        parts.append(f"## {path}\n\n{table(('parameter', 'type', 'rule', 'how, or why'), rows)}")
    return "\n".join(parts)


def _kind(each: Parameter) -> str:
    kind = _TYPES.get(each.type.rstrip("!"), each.type.rstrip("!"))
    if each.type.endswith("!"):
        return f"{kind}; required"
    return kind if each.neutral is None else f"{kind}; allowed: `{each.neutral}`"
