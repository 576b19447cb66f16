"""The parts of a JSON schema that a grammar would not apply to answers.

xgrammar ignores them without an error, and vLLM refuses some of them at the first request.
schemas.toml has the keywords; `benchmarks/generation/schemas.py` tries public schemas.
"""

import json
from collections.abc import Iterator
from typing import Any

from async_rl.core.calls import Support
from async_rl.core.errors import DataError
from async_rl.core.records import read_packaged

_TABLES = read_packaged(__package__, "schemas.toml", dict[str, dict[str, list[str]]])
_OF_TYPE = _TABLES["of_type"]
_INSTEAD = _TABLES["instead"]
_OTHER = _TABLES["other"]
_KEYWORDS = {"type", *_OTHER["never"], *_INSTEAD}.union(*_OF_TYPE.values())


def require_applied(support: Support) -> None:
    """Raise DataError if answers of this support need not fit its JSON schema."""
    if support.grammar.lstrip().startswith("{"):
        for schema in _schemas_of(json.loads(support.grammar)):
            for part in ignored_parts(schema):
                raise DataError(
                    f"the schema of the answer has {part}, which the engine would not enforce;"
                    " leave it out, or tell it to the model in the prompt"
                )


def _schemas_of(grammar: Any) -> Iterator[Any]:
    """Yield the schemas in a part of a structural tag; anything else is one."""
    if grammar.get("type") != "structural_tag":
        yield grammar
        return
    parts = [grammar]
    for part in parts:
        if isinstance(part, dict):
            yield part.get("json_schema")
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def ignored_parts(schema: Any, path: str = "#") -> Iterator[str]:
    """Yield path=value of each part of a schema that answers would not have to fit."""
    if not isinstance(schema, dict):
        return
    for key in sorted(schema.keys() & _KEYWORDS - _applied(schema)):
        yield f"{path}/{key}={schema[key]!r:.100}"
    for key, value in schema.items():
        if key in _OTHER["named"] and isinstance(value, dict):
            for name, part in value.items():
                yield from ignored_parts(part, f"{path}/{key}/{name}")
        elif key not in _OTHER["values"]:
            for part in value if isinstance(value, list) else [value]:
                yield from ignored_parts(part, f"{path}/{key}")


def _applied(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of a schema that are applied, and others that it does not have."""
    for key, others in _INSTEAD.items():
        if key in schema:
            if _is_exact(schema, key):
                return {key, *others}
            return set(others)
    implied = [kind for kind, keys in _TABLES["implied"].items() if schema.keys() & keys]
    kinds = schema.get("type", implied)
    names = {"type"}
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        names.update(_OF_TYPE.get(str(kind), ()))
    return {key for key in names & schema.keys() if _is_exact(schema, key)}


def _is_exact(schema: dict[str, Any], key: str) -> bool:
    value = schema[key]
    if schema.keys() & _TABLES["apart"].get(key, ()):
        return False
    match key, value:
        case "$ref", _:
            return f"{value}/".startswith("#/")
        case "allOf", [_, _, *_]:
            return False
        case "oneOf", _:
            # Applied as anyOf, which is the same if a property distinguishes the alternatives.
            return "discriminator" in schema
        case "format", _:
            return value in _OTHER["formats"]
        case "patternProperties", dict():
            return len(value) == 1
        case "required", list():
            known = schema.get("properties")
            return isinstance(known, dict) and all(str(name) in known for name in value)
    return True
