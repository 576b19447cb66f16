"""What no file may hold, whoever wrote it."""

from __future__ import annotations

import ast
import re

from repository import files, name, product

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
# Written in halves, so that this file does not hold what it forbids.
REGISTRY_HOSTS = re.compile(
    "|".join(
        re.escape(a + b)
        for a, b in [
            ("pypi.", "org"),
            ("files.python", "hosted.org"),
            ("download.py", "torch.org"),
            ("npmjs", ".org"),
            ("npmjs", ".com"),
        ]
    )
    + "|"
    + re.escape("deb.")
    + re.escape("debian.org")
)
BOUNDARIES = {"async_rl/runtime/main.py", "async_rl/rollouts/groups.py"}


def test_no_pickle_outside_the_jail() -> None:
    wrong = []
    for path in product():
        if name(path).startswith("sandbox/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            wrong += [
                f"{name(path)} imports {module}"
                for module in modules
                if module.split(".")[0] in FORBIDDEN_MODULES
            ]
    assert wrong == []


def test_no_eval_and_no_exec_outside_the_jail() -> None:
    wrong = [
        f"{name(path)}:{node.lineno} calls {node.func.id}"
        for path in product()
        if not name(path).startswith("sandbox/")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FORBIDDEN_CALLS
    ]
    assert wrong == []


def test_torch_load_never_unpickles() -> None:
    wrong = [
        f"{name(path)}:{node.lineno}"
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and not any(
            k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
        )
    ]
    assert wrong == []


def test_no_file_names_a_package_registry() -> None:
    wrong = []
    for path in files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        wrong += [f"{name(path)} names {match.group()}" for match in REGISTRY_HOSTS.finditer(text)]
    assert wrong == []


def test_every_exception_is_caught_at_the_two_boundaries_only() -> None:
    wrong = []
    for path in product():
        if name(path).startswith("sandbox/") or name(path) in BOUNDARIES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) == "Exception"
            ):
                wrong.append(f"{name(path)}:{node.lineno}")
    assert wrong == []
