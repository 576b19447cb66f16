"""The engine arguments and parsers of tool calls of the installed vLLM, read from its source: an
import would take seconds and hundreds of MB.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.config.generation import TOOL_PARSER
from async_rl.generation.vllm.installed import version_problem

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
    if problem := version_problem():
        yield problem
    for entry in extra:
        name, _, value = entry.partition("=")
        if name == TOOL_PARSER:
            kind = "parser"
            word = value
            known = tool_parsers(root)
        else:
            kind = "engine argument"
            word = name
            known = engine_arguments(root)
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
            yield (f"generation.vllm.extra={entry}: the installed vLLM has no such {kind}; {hint}")
