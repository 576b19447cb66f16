"""Give a module of the product other code, in a fork of the process."""

import importlib.abc
import importlib.machinery
import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PRODUCT = Path(__file__).parents[1] / "async_rl"
_IN_FUNCTION = ".<locals>"


def module_name(file: str) -> str:
    """Return the name of the module of a file below async_rl/."""
    return "async_rl." + file.removesuffix(".py").replace("/", ".")


class Planter(importlib.abc.MetaPathFinder):
    """Imports one module of the product from another source."""

    def __init__(self, file: str, source: str) -> None:
        self._path = PRODUCT / file
        self._name = module_name(file)
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name != self._name:
            return None
        code = compile(self._source, str(self._path), "exec")

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return code

        return importlib.util.spec_from_loader(name, Loader(name, str(self._path)))


def replace_functions(module: ModuleType, source: str) -> bool:
    """Give the functions of an imported module the code of another source; return False, and change
    nothing, if the source differs in what runs at the import.
    """
    path = str(module.__file__)
    old, new = (_codes(compile(text, path, "exec")) for text in (Path(path).read_text(), source))
    changed = {name for name in old if [*map(_own, old[name])] != [*map(_own, new.get(name, []))]}
    roots = {name.partition(_IN_FUNCTION)[0] for name in changed}
    functions = [f for f in _functions(module) if f.__code__.co_qualname in roots]
    if roots - {f.__code__.co_qualname for f in functions}:
        return False
    for function in functions:
        name, line = function.__code__.co_qualname, function.__code__.co_firstlineno
        number = [code.co_firstlineno for code in old[name]].index(line)
        function.__code__ = new[name][number]
    return True


def _codes(code: CodeType) -> dict[str, list[CodeType]]:
    """The code of the module, its classes and its functions, by qualified name."""
    found: defaultdict[str, list[CodeType]] = defaultdict(list)

    def walk(code: CodeType) -> None:
        found[code.co_qualname].append(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                walk(constant)

    walk(code)
    return found


def _own(code: CodeType) -> Any:
    """Return what a code does, without the lines and without the code inside."""
    constants = [(type(c), c) for c in code.co_consts if not isinstance(c, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, also inside their decorators."""
    queue: list[Any] = list(vars(module).values())
    seen = set()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
            yield value
        if isinstance(value, type) and value.__module__ == module.__name__:
            queue += vars(value).values()
        elif isinstance(value, property):
            queue += (value.fget, value.fset)
        elif isinstance(value, staticmethod | classmethod):
            queue.append(value.__func__)
        else:
            queue.append(_attributes(value).get("__wrapped__"))


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return vars(value)
    except TypeError:
        return {}
