"""The parameters of every API in one table, and requests read by it.

parameters.toml says of each parameter whether it is honored, refused or ignored, and why; a request
with any other parameter is refused. docs/parameters.md is generated from it.
"""

import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from async_rl.core.calls import MOST_TOP
from async_rl.core.frozen import frozen
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.forms.form import read

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Top = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOP)]
_TYPES: Mapping[str, Any] = {
    "any": Any,
    "biases": dict[int, Annotated[float, msgspec.Meta(ge=-100, le=100)]],
    "blocks": str | list[Json],
    "bool": bool,
    "choice": str | Json,
    # The limit of OpenAI's API.
    "choices": Annotated[int, msgspec.Meta(ge=1, le=128)],
    "count": Annotated[int, msgspec.Meta(ge=1)],
    "ids": Annotated[list[_Id], msgspec.Meta(min_length=1)],
    "int": int,
    "id_list": list[_Id],
    "least": Annotated[int, msgspec.Meta(ge=0)],
    "list": list[Any],
    "messages": Annotated[list[Json], msgspec.Meta(min_length=1)],
    "number": float,
    "object": Json,
    "objects": list[Json],
    "scores": bool | _Top,
    "text": str,
    "texts": str | list[str],
    "top": _Top,
}


@frozen
class Parameter:
    """One parameter of one API. type: a key of the types, with ! if it is required. neutral: with
    rule refused, the value that asks for nothing.
    """

    name: str
    type: str
    rule: str
    why: str
    neutral: Any

    @property
    def field(self) -> tuple[Any, ...]:
        """The field of a request."""
        kind = _TYPES[self.type.rstrip("!")]
        if self.type.endswith("!"):
            return (self.name, kind)
        return (self.name, kind | None, None)

    def refuses(self, value: Any) -> bool:
        """Return whether a request with this value is refused."""
        if self.rule != "refused" or value is None or value == self.neutral:
            return False
        return self.neutral is not None or bool(value)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HOSTED = tuple(_FILE["hosted_tools"])
"""The beginnings of the types of tools that another service runs."""
TABLE: dict[str, list[Parameter]] = {}
"""The parameters of each API."""
for _group in _FILE["group"]:
    for _name, _spec in _group["types"].items():
        _type, _, _neutral = _spec.partition(" ")
        for _api in _group["apis"]:
            TABLE.setdefault(_api, []).append(
                Parameter(
                    name=_name,
                    type=_type,
                    rule=_group["rule"],
                    why=_group["why"],
                    neutral=msgspec.json.decode(_neutral or "null"),
                )
            )
_REQUESTS: Mapping[str, Any] = {
    api: msgspec.defstruct(
        api, [each.field for each in table], forbid_unknown_fields=True, kw_only=True
    )
    for api, table in TABLE.items()
}


def read_request(body: bytes, api: str) -> Any:
    """Return the request of an API, with an attribute for each parameter. Raises Refused."""
    request = read(body, _REQUESTS[api])
    for parameter in TABLE[api]:
        value = getattr(request, parameter.name)
        if parameter.refuses(value):
            raise Refused(
                f"{parameter.name}={reprlib.repr(value)} is not supported here: {parameter.why}",
                param=parameter.name,
            )
    return request
