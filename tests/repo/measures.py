"""The measures of the product and of the tests, and their limits in size.toml.

usage: measures.py           prints every measure with its limit
       measures.py --lower   writes lower limits where a measure has become smaller
       measures.py --private prints the lines of tests that reach a private name of the product
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, module, product, syntax, tests

LIMITS = ROOT / "tests" / "repo" / "size.toml"
ROLES = ("buffer", "generator", "verifier", "learner")
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@functools.cache
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
    tree = syntax(path)
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


def lines_of_tests() -> int:
    """Return the lines of all Python files of tests/."""
    return sum(len(path.read_text().splitlines()) for path in tests())


def private_names_reached() -> list[str]:
    """Return each line of a test that reaches a private name of the product, as FILE:LINE NAME: an
    attribute of another object than the test's own, an import, or a name to replace.
    """
    private = set().union(*(_defined(path) for path in product()))
    found: dict[str, None] = {}
    for path in tests():
        for line, reached in _reached(syntax(path), private - _defined(path)):
            found[f"{path.relative_to(ROOT)}:{line} {reached}"] = None
    return list(found)


def _is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and len(word) > 1


def _defined(path: Path) -> set[str]:
    """Return the private names of functions, classes, attributes and constants of a file."""
    words: set[str] = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            words.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("self.", "cls.")):
            words.add(node.attr)
    return {word for word in words if _is_private(word)}


def _reached(tree: ast.Module, private: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, a.name) for a in node.names if a.name in private)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            last = [str(word).rpartition(".")[2] for word in words]
            yield from ((node.lineno, word) for word in last if word in private)


def measured() -> dict[str, dict[str, int]]:
    """Return the measures of this tree, as size.toml groups them, without the walk."""
    return {
        "reach": reached_lines(),
        "tests": {"lines": lines_of_tests(), "private": len(private_names_reached())},
        "tokens": tokens_by_package(),
    }


def limits() -> dict[str, dict[str, int]]:
    """Return the content of size.toml."""
    return dict(tomllib.loads(LIMITS.read_text()))


def main() -> None:
    """Print the measures, or lower their limits."""
    if "--private" in sys.argv[1:]:
        sys.stdout.write("\n".join(private_names_reached()) + "\n")
        return
    before, now = limits(), measured()
    if "--lower" in sys.argv[1:]:
        for group, values in now.items():
            known = before.get(group, {})
            before[group] = {key: min(n, known.get(key, n)) for key, n in values.items()}
        _write(before)
        return
    for group, values in now.items():
        for key, number in values.items():
            sys.stdout.write(f"{group:8}{key:28}{number:8}{before.get(group, {}).get(key, 0):8}\n")
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
