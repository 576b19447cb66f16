"""Imports go down only, and each heavy dependency has its adapter."""

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from repository import ROOT, imports, module, name, product, syntax

ADAPTERS = {
    "zmq": ("async_rl/wire/",),
    "vllm": ("async_rl/generation/vllm/",),
    "ray": ("launchers/backends/ray_actors.py",),
    "hydra": ("async_rl/composition/", "launchers/migration/sources.py"),
    "omegaconf": ("async_rl/composition/", "launchers/migration/sources.py"),
    "tensorboard": ("async_rl/monitoring/",),
    "wandb": ("async_rl/monitoring/exports.py",),
    "rich": ("async_rl/monitoring/", "launchers/"),
    "typer": ("launchers/",),
    "starlette": (
        "async_rl/rewards/",
        "async_rl/service/front.py",
        "async_rl/sessions/",
        "async_rl/wire/http.py",
        "async_rl/runs/view/",
    ),
    "httpx": (
        "async_rl/adapters/grader.py",
        "async_rl/adapters/verifiers_tasks.py",
        "async_rl/rewards/",
        "async_rl/data/model_files.py",
        "launchers/api/session.py",
    ),
    "sqlite3": (
        "async_rl/buffer/store/",
        "async_rl/data/prompt_file.py",
        "async_rl/data/prompts.py",
    ),
}
"""Who may import what; everyone else reaches it through them."""


def test_the_layer_contracts_hold(tmp_path: Path) -> None:
    # import-linter reads packages from disk and knows nothing of setuptools' package-dir: give it
    # the tree as it is installed.
    for path in product():
        folder, *rest = path.relative_to(ROOT).parts
        installed = tmp_path.joinpath(
            *(["async_rl"] if folder == "async_rl" else ["async_rl", folder]), *rest
        )
        installed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, installed)
    lint = Path(sys.executable).parent / "lint-imports"
    arguments = [lint, "--no-logo", "--no-cache", "--config", ROOT / "pyproject.toml"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    num_files, num_imports = map(
        int, re.findall(r"Analyzed (\d+) files, (\d+) dependencies", result.stdout)[0]
    )
    assert num_files == len(product())
    assert num_imports > num_files


def test_a_heavy_dependency_is_imported_by_its_adapter_only() -> None:
    wrong = [
        f"{name(path)} imports {package}; only {' and '.join(ADAPTERS[package])} may"
        for path in product()
        for package in sorted(imports(path) & ADAPTERS.keys())
        if not name(path).startswith(ADAPTERS[package])
    ]
    assert wrong == []


def test_what_runs_inside_the_jail_imports_the_standard_library_only() -> None:
    wrong = [
        f"{name(path)} imports {package}"
        for path in product()
        if name(path).startswith("sandbox/")
        for package in sorted(imports(path))
        if package not in sys.stdlib_module_names and package != "async_rl"
    ]
    assert wrong == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for annotations count too: a reader follows them."""
    files = {module(path): path for path in product()}
    imported = {
        name: {other for other in named_modules(path, name) if other in files and other != name}
        for name, path in files.items()
    }
    graph = TopologicalSorter(imported)
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of files: {' -> '.join(reversed(error.args[1]))}")


def named_modules(path: Path, name: str) -> Iterator[str]:
    """The modules that a file imports anywhere, also inside functions and for annotations."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(filter(None, [package if node.level else "", node.module]))
            inner = [f"{start}.{alias.name}" for alias in node.names]
            # `from package import module` ties to the module, not to the package.
            yield from inner
            if not modules().issuperset(inner):
                yield start


@functools.cache
def modules() -> frozenset[str]:
    """The modules of the product."""
    return frozenset(module(path) for path in product())


KINDS = {"local", "ray", "slurm", "colocated", "disaggregated", "vllm", "hf", "lora"}
OPENERS = {
    "async_rl/config/generation.py",
    "async_rl/config/launchers.py",
    "async_rl/core/machine.py",
    "launchers/backends/ray_actors.py",
    "launchers/migration/areal.py",
}
"""Files that choose an engine by its name, or where a name means something else: an address of Ray,
a package, an engine of AReaL.
"""


def compared_kinds(path: Path) -> set[str]:
    """Names of launchers, placements, engines and adapters that a file compares a value with."""
    return {
        str(part.value)
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Compare | ast.MatchValue)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in KINDS
    }


def test_settings_are_asked_what_they_can_do() -> None:
    """A comparison with a name has to be found again for each new launcher or engine."""
    found = {name(path): kinds for path in product() if (kinds := compared_kinds(path))}
    assert found.keys() <= OPENERS, (
        "ask config.launcher, config.takes_turns, config.generation.is_vllm or config.model.adapter"
    )
