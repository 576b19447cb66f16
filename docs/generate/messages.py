"""The page docs/messages.md: every message between processes with its fields and its reply,
generated from async_rl/protocol and the values that messages contain.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import msgspec

from async_rl.core import programs, types
from async_rl.core.frozen import Value
from async_rl.protocol import base, buffer, generator, supervisor, weights
from docs.generate.settings import table

_HEAD = """# Messages

`make docs` generates this page from `async_rl/protocol/`, `async_rl/core/types.py` and
`async_rl/core/programs.py`. The processes of a run exchange these messages over ZeroMQ, as
MessagePack maps with the name of the message in `type`; an array is a map of `dtype`, `shape` and
the bytes. An unknown field is refused. A request is repeated if its reply is lost, so every handler
accepts it twice. `control.json` of a run has a fingerprint of all messages; a process or a command
of a version with other messages is refused. The requests to a verifier are HTTP
([verifier.md](verifier.md)).

A row has a request and its reply. The file of each section has their fields. `Ok` is a reply
without content. A handler that fails replies `Failure`, with a class of `async_rl/core/errors.py`.
"""
_MESSAGES = {
    "Messages to the buffer": buffer,
    "Messages to generators": generator,
    "Messages to the supervisor": supervisor,
    "Weights": weights,
}
_VALUES = {"Values in messages": types, "Values of tests by printed text": programs}


def messages_page() -> str:
    """Every request, by the process that receives it, and every value in messages."""
    parts = [_HEAD]
    for title, module in _MESSAGES.items():
        requests = [kind for kind in _kinds(module) if issubclass(kind, base.Request)]
        exchanges = [(_exchange(kind), _meaning(kind)) for kind in requests]
        place = f"`{module.__name__.replace('.', '/')}.py`"
        text = table(("request -> reply", "meaning"), exchanges)
        parts.append(f"## {title}\n\n{place}\n\n{text}\n")
    for title, module in _VALUES.items():
        rows = [(f"`{kind.__name__}`", _fields(kind), _meaning(kind)) for kind in _kinds(module)]
        parts.append(f"## {title}\n\n{table(('value', 'fields', 'meaning'), rows)}\n")
    return "\n".join(parts)


def _kinds(module: ModuleType) -> Iterator[type[Value]]:
    """The values that a module defines, without the bases of others, whose fields those repeat."""
    for kind in vars(module).values():
        is_value = inspect.isclass(kind) and issubclass(kind, Value) and kind is not Value
        if is_value and kind.__module__ == module.__name__ and not _is_base(kind):
            yield kind


def _is_base(kind: type[Value]) -> bool:
    """Return whether the module of this value derives others from it."""
    return any(other.__module__ == kind.__module__ for other in kind.__subclasses__())


def _exchange(kind: type[base.Request]) -> str:
    return f"`{kind.__name__}` -> `{kind.Reply.__name__}`"


def _fields(kind: type[Value]) -> str:
    """The fields with the types that their class writes, without the bounds of a number or text."""
    annotations = {
        statement.target.id: ast.unparse(_without_bounds(statement.annotation))
        for base in kind.__mro__
        if issubclass(base, Value)
        for statement in ast.walk(ast.parse(inspect.getsource(base)))
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return ", ".join(f"`{f.name}: {annotations[f.name]}`" for f in msgspec.structs.fields(kind))


def _without_bounds(annotation: ast.expr) -> ast.expr:
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return kind
    return annotation


def _meaning(kind: type[Value]) -> str:
    """The first paragraph of the docstring; what a field means stands in the code."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
