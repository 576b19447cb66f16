"""The tracked files of this repository, which the policy tests read."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = ("async_rl", "launchers", "sandbox", "conf")


@functools.cache
def files(suffix: str = "") -> tuple[Path, ...]:
    """Tracked files and new ones that git does not ignore, by path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = (
        ROOT / name for name in sorted(set(listed.split("\0"))) if name.endswith(suffix) and name
    )
    return tuple(path for path in paths if path.is_file())


@functools.cache
def product() -> tuple[Path, ...]:
    """Python files of the product: no tests, no benchmarks."""
    return tuple(
        path for path in files(".py") if path.relative_to(ROOT).parts[0] in PRODUCT_FOLDERS
    )


@functools.cache
def tests() -> tuple[Path, ...]:
    """Python files of tests/."""
    return tuple(path for path in files(".py") if path.relative_to(ROOT).parts[0] == "tests")


@functools.cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of a file, which many rules read."""
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """The top-level names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def name(path: Path) -> str:
    """The path as people write it."""
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    """The dotted name under which a file of the product is installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "async_rl" else ("async_rl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
