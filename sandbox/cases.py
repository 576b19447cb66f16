"""Tests in the forms of pytest and unittest, in the child of a test: runs them, and lets a patch of
a module reach the program.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from .namespaces import SCRATCH

_PATCHERS = ("unittest.mock", "_pytest.monkeypatch")
# The streams of the program are the streams of the test.
_STREAMS = {("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}
_OPTIONS = (
    "-x -q --noconftest --tb=no --assert=plain --capture=no -pno:cacheprovider -pno:faulthandler"
    f" -c/dev/null --rootdir={SCRATCH}"
).split()


def run(module: types.ModuleType) -> None:
    """Run the functions and classes of tests that the module has defined."""
    for case in list(_cases(module.__dict__)):
        case()


def _cases(namespace: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Tests in the forms of pytest and unittest."""
    for name, value in namespace.items():
        if isinstance(value, types.FunctionType):
            code = value.__code__
            num_required = code.co_argcount - len(value.__defaults__ or ())
            if name.startswith("test") and code.co_filename == "test" and not num_required:
                yield value
        elif isinstance(value, type) and value.__module__ == "test":
            if "unittest" in sys.modules and issubclass(value, sys.modules["unittest"].TestCase):
                yield sys.modules["unittest"].TestLoader().loadTestsFromTestCase(value).debug
            elif name.startswith("Test"):
                methods = [method for method in dir(value) if method.startswith("test")]
                yield from (getattr(value(), method) for method in methods)


def run_by_pytest(module: types.ModuleType) -> None:
    """Run the tests of a module by pytest itself, up to the first failure, which is raised."""
    # Not at the start of a zygote, which copies its memory for each program.
    pathlib, pytest = map(importlib.import_module, ("pathlib", "pytest"))
    problems: list[BaseException] = []
    kind: Any = type("Tests", (pytest.Module,), {"_getobj": lambda _: module})

    class Plugin:
        def pytest_collection(self, session: Any) -> bool:
            found = kind.from_parent(session, path=pathlib.Path(SCRATCH, "test.py"))
            session.items = list(session.genitems(found))
            session.testscollected = len(session.items)
            return True

        def pytest_exception_interact(self, call: Any) -> None:
            problems.append(call.excinfo.value)

    # Plugins of other packages take a second.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    status = pytest.main(_OPTIONS, plugins=[Plugin()])
    if status:
        raise problems[0] if problems else RuntimeError(f"pytest exited with status {status}")


def share_patches(code: str, ask: Callable[..., Any]) -> None:
    """Let `mock.patch` and `monkeypatch` of a module patch the program's module of the same name.

    ask: (operation, arguments) asks the program.
    """
    patchers = [sys.modules[name] for name in _PATCHERS if name in sys.modules]
    if "patch" not in code or not patchers:
        return
    shared: dict[tuple[str, str], tuple[Any, Any, Any]] = {}

    def set_both(target: Any, name: str, value: Any) -> None:
        if isinstance(target, types.ModuleType) and (target.__name__, name) not in _STREAMS:
            key = target.__name__, name
            if key not in shared:
                theirs = ask("import", target.__name__)
                shared[key] = (
                    theirs,
                    getattr(target, name, None),
                    ask("getattr", theirs, name, None),
                )
            theirs, mine, original = shared[key]
            setattr(theirs, name, original if value is mine else value)
        setattr(target, name, value)

    def delete_both(target: Any, name: str) -> None:
        if isinstance(target, types.ModuleType):
            theirs, _, original = shared[target.__name__, name]
            setattr(theirs, name, original)
        delattr(target, name)

    # These names hide the builtins in the modules that patch.
    for module in patchers:
        vars(module).update(setattr=set_both, delattr=delete_both)
