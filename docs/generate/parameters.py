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
    "bool": "bool",
    "choice": "text or object",
    "choices": "int, 1 to 128",
    "count": "int >= 1",
    "id_list": "list of int",
    "ids": "list of int, not empty",
    "least": "int >= 0",
    "messages": "list, not empty",
    "number": "float",
    "objects": "list of objects",
    "scores": "bool, or int, 0 to 20",
    "texts": "text or list of text",
    "top": "int, 0 to 20",
}
_HEAD = """# Parameters of the endpoint

`make docs` generates this page from `async_rl/sessions/forms/parameters.toml`; edit that file. It
lists the parameters that a request of an [agent](agents.md) may have. Any other parameter, and a
value of another type, is refused with status 400, in the form of the API, with the name in `param`.
"""
_REFUSED = """
## Parameters that are refused

The parameters of a line are refused for the reason after them, unless the value asks for nothing:
null, false, 0, empty, or the value that is named as allowed.
"""
_IGNORED = """
## Parameters that are ignored

They change nothing that is sampled or trained.
"""
_HOSTED = """
Other services run the tools whose types begin with
{hosted}.
They are left out of the prompt, so the policy never calls them.
"""


def parameters_page() -> str:
    """The whole page."""
    acting: dict[tuple[str, str, str], list[str]] = {}
    for api in _APIS:
        for each in TABLE[api]:
            if each.rule == "honored":
                acting.setdefault((each.name, _kind(each), each.why), []).append(api)
    names: dict[tuple[str, str, str], list[str]] = {}
    for (name, kind, why), apis in sorted(acting.items(), key=lambda each: each[0][0]):
        names.setdefault((", ".join(apis), kind, why), []).append(f"`{name}`")
    rows = [(", ".join(named), *rest) for rest, named in names.items()]
    parts = [
        _HEAD,
        table(("name below", "API"), list(_APIS.items())),
        "\n## Parameters that act\n",
        table(("parameter", "of", "type", "effect"), rows),
        f"{_REFUSED}\n{_reasons('refused')}{_IGNORED}\n{_reasons('ignored')}",
        _HOSTED.format(hosted=", ".join(f"`{name}`" for name in HOSTED)).lstrip(),
    ]
    return "\n".join(parts)


def _reasons(rule: str) -> str:
    """Return a list of the parameters of each reason, with their APIs."""
    apis: dict[tuple[str, str], list[str]] = {}
    for api in _APIS:
        for each in sorted(TABLE[api], key=lambda each: each.name):
            if each.rule == rule:
                allowed = "" if each.neutral is None else f" (allowed: `{each.neutral}`)"
                apis.setdefault((each.why, f"`{each.name}`{allowed}"), []).append(api)
    names: dict[tuple[str, str], list[str]] = {}
    for (why, name), found in apis.items():
        names.setdefault((why, ", ".join(found)), []).append(name)
    return "".join(
        f"- {', '.join(named)} ({which}): {why}\n" for (why, which), named in names.items()
    )


def _kind(each: Parameter) -> str:
    kind = _TYPES.get(each.type.rstrip("!"), each.type.rstrip("!"))
    return f"{kind}; required" if each.type.endswith("!") else kind
