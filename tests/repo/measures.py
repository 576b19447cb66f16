"""The three measures of the product's size, and their limits in size.toml.

usage: measures.py           prints every measure with its limit
       measures.py --lower   writes lower limits where the product has become smaller
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from repository import ROOT, module, product

LIMITS = ROOT / "tests" / "repo" / "size.toml"
ROLES = ("buffer", "generator", "verifier", "learner")
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def tokens_of(text: str) -> tuple[int, int]:
    """Return (tokens, lines with any): names, operators and literals, without docstrings."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    counted = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in _COUNTED and token.start not in docstrings
    ]
    lines = {row for token in counted for row in range(token.start[0], token.end[0] + 1)}
    return len(counted), len(lines)


def tokens_by_package() -> dict[str, int]:
    """Return the tokens of each package: async_rl/buffer, launchers/backends, sandbox."""
    total: Counter[str] = Counter()
    for path in product():
        parts = path.relative_to(ROOT).parts
        total["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += tokens_of(path.read_text())[0]
    return dict(sorted(total.items()))


def reached_lines() -> dict[str, int]:
    """Return the lines that each role's process can import, and those of all roles together."""
    files = {module(path): path for path in product()}
    imports = {name: _imports(path, files) for name, path in files.items()}
    reached = {role: _closure(f"async_rl.processes.{role}", imports) for role in ROLES}
    reached["together"] = set().union(*reached.values())
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    return {role: sum(lines[m] for m in modules - packages) for role, modules in reached.items()}


def _imports(path: Path, files: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports anywhere, or names in a string as `module:function` or
    `module`, except for annotations alone.
    """
    tree = ast.parse(path.read_text())
    only_typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in only_typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module, *inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # An import by name would hide a module from this measure.
            found.add(node.value.partition(":")[0])
    return found & files.keys()


def _closure(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports[module]
    return reached


def measured() -> dict[str, dict[str, int]]:
    """Return the measures of this tree, as size.toml groups them, without the walk."""
    return {"reach": reached_lines(), "tokens": tokens_by_package()}


def limits() -> dict[str, dict[str, int]]:
    """Return the content of size.toml."""
    return dict(tomllib.loads(LIMITS.read_text()))


def main() -> None:
    """Print the measures, or lower their limits."""
    before, now = limits(), measured()
    if "--lower" in sys.argv[1:]:
        for group, values in now.items():
            known = before.get(group, {})
            before[group] = {key: min(n, known.get(key, n)) for key, n in values.items()}
        _write(before)
        return
    for group, values in now.items():
        for key, number in values.items():
            sys.stdout.write(f"{group:8}{key:28}{number:8}{before[group].get(key, 0):8}\n")
    sys.stdout.write(f"{'tokens':8}{'all':28}{sum(now['tokens'].values()):8}\n")


def _write(groups: dict[str, dict[str, int]]) -> None:
    head = LIMITS.read_text().partition("\n[")[0]
    parts = [
        f"[{group}]\n" + "".join(f'"{key}" = {number}\n' for key, number in sorted(values.items()))
        for group, values in groups.items()
    ]
    LIMITS.write_text(head + "\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
