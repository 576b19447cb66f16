"""The part of vLLM that the product uses, read from the product's own source: imported names, and
the methods and attributes of vLLM's classes.

`missing` looks all of them up in the source of some vLLM, without importing it, so a version can be
checked on any machine. Names that vLLM makes at run time would not be found; none is used.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import async_rl.generation.vllm

_HERE = Path(async_rl.generation.vllm.__path__[0])
_PACKAGE = _HERE.parents[1]
_HELD_AS = {
    "_core": ("vllm.v1.engine.core", "EngineCore"),
    "llm": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "core": ("vllm.v1.engine.core_client", "AsyncMPClient"),
    "lora_manager": ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager"),
    "manager": ("vllm.lora.model_manager", "LRUCacheLoRAModelManager"),
    "params": ("vllm.sampling_params", "SamplingParams"),
}
"""Variables and attributes of generation/vllm/ that hold an object of vLLM, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Use:
    """One name of vLLM. member: an attribute of the class `name`, or empty."""

    module: str
    name: str
    member: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (f".{self.member}" if self.member else "")


@functools.cache
def uses() -> Sequence[Use]:
    """Return all names of vLLM in this project's source, sorted."""
    found: set[Use] = set()
    for path in sorted(_PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found |= set(_imports(tree))
        if path.parent == _HERE:
            found |= set(_members(tree))
    return sorted(found)


def missing(root: Path) -> list[str]:
    """Return the names that the vLLM at `root` lacks."""
    return [str(use) for use in uses() if not _has(root, use)]


def _imports(tree: ast.AST) -> Iterator[Use]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                yield Use(module=str(node.module), name=alias.name)


def _members(tree: ast.Module) -> Iterator[Use]:
    """Attributes of objects that `_HELD_AS` names, and methods that a subclass overrides or calls
    through super().
    """
    imported = {use.name: use.module for use in _imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            held = node.value
            name = held.attr if isinstance(held, ast.Attribute) else ""
            name = held.id if isinstance(held, ast.Name) else name
            if name in _HELD_AS and not node.attr.startswith("__"):
                module, owner = _HELD_AS[name]
                yield Use(module=module, name=owner, member=node.attr)
        if isinstance(node, ast.ClassDef):
            bases = [b.id for b in node.bases if isinstance(b, ast.Name) and b.id in imported]
            called = {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "super()"
            }
            for base in bases:
                yield from (
                    Use(module=imported[base], name=base, member=method)
                    for method in called - {"__init__"}
                )


def _has(root: Path, use: Use) -> bool:
    if not use.member:
        return _definition(root, use.module, use.name) is not None
    found = _class(root, use.module, use.name)
    return found is not None and use.member in _class_members(root, *found)


@functools.cache
def _bound(root: Path, module: str) -> dict[str, ast.stmt | tuple[str, str]]:
    """Names that a module binds at its top level: statements, or (module, name) of imports."""
    inside = root.joinpath(*module.split(".")[1:])
    path = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    bound: dict[str, ast.stmt | tuple[str, str]] = {}
    if not path.is_file():
        return bound
    blocks = list(ast.parse(path.read_text()).body)
    while blocks:
        node = blocks.pop(0)
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                bound[node.name] = node
            case ast.ImportFrom():
                source = _absolute(module, path, node)
                bound |= {a.asname or a.name: (source, a.name) for a in node.names}
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            case ast.If():
                blocks += [*node.body, *node.orelse]
            case ast.Try():
                blocks += [*node.body, *node.orelse, *(n for h in node.handlers for n in h.body)]
    return bound


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*parts, *filter(None, [node.module])])


def _definition(root: Path, module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The module and the statement that define a name, through any number of imports."""
    match _bound(root, module).get(name):
        case None:
            # `from package import module`.
            return (module, ast.Pass()) if _bound(root, f"{module}.{name}") else None
        case (str() as source, str() as original):
            if source.partition(".")[0] != "vllm":
                return module, ast.Pass()
            return _definition(root, source, original)
        case statement:
            return module, statement


def _class(root: Path, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    found = _definition(root, module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    return found[0], found[1]


def _class_members(root: Path, module: str, node: ast.ClassDef) -> Collection[str]:
    """Methods, fields and attributes of `self`, of the class and its bases in vLLM."""
    names: set[str] = set()
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(inner.name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    for base in node.bases:
        text = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(text, ast.Name):
            found = _class(root, module, text.id)
            names |= set(_class_members(root, *found)) if found else set()
    return names
