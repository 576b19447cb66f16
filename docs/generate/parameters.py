"""The page docs/parameters.md: what the endpoint does with each parameter of each API, generated
from async_rl/sessions/forms/parameters.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        rules: dict[str, list[Parameter]] = {rule: [] for rule in ("honored", "refused", "ignored")}
        for each in sorted(TABLE[api], key=lambda each: each.name):
            rules[each.rule].append(each)
        rows = [(f"`{each.name}`", _kind(each), each.why) for each in rules["honored"]]
        parts.append(f"## {path}\n\n{table(('parameter', 'type', 'effect'), rows)}")
        parts += _reasons("Refused", rules["refused"]) + _reasons("Ignored", rules["ignored"])
    return "\n".join(parts)


def _reasons(rule: str, parameters: Sequence[Parameter]) -> list[str]:
    """Return a list of the parameters of each reason; empty without parameters."""
    names: dict[str, list[str]] = {}
    for each in parameters:
        allowed = "" if each.neutral is None else f" (allowed: `{each.neutral}`)"
        names.setdefault(each.why, []).append(f"`{each.name}`{allowed}")
    lines = [f"- {', '.join(named)}: {why}\n" for why, named in names.items()]
    return [f"\n{rule}:\n", "".join(lines)] if lines else []


def _kind(each: Parameter) -> str:
    kind = _TYPES.get(each.type.rstrip("!"), each.type.rstrip("!"))
    return f"{kind}; required" if each.type.endswith("!") else kind
