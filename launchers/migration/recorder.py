"""Runs a person's Python script in the jail, with recorders in place of its packages.

A program of the jail: it uses the standard library only, and prints JSON. Invariants: a class whose
name ends in Config, Arguments, Parser or Trainer keeps its arguments; every other name of a foreign
package is an unknown value, on which every operation gives an unknown value again; what the script
did until an error is printed with the error.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import runpy
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_trainers: list[Any] = []
_notes: list[str] = []


class Unknown:
    """A value that only the real packages know; text: the expression that gives it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self._text}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unknown result, whose text shows the arguments."""
        # A decorator leaves the function of the script; `data.map(f)` is none.
        is_method = "." in self._text.rpartition(")")[2]
        if args and isinstance(args[0], types.FunctionType) and not is_method:
            return args[0]
        given = [repr(value) for value in args]
        given += [f"{name}={value!r}" for name, value in kwargs.items()]
        return Unknown(f"{self._text}({', '.join(given)})")

    def __getitem__(self, key: Any) -> Unknown:
        return Unknown(f"{self._text}[{key!r}]")

    def __bool__(self) -> bool:
        # The script goes another way than with the real value; the report says so.
        _notes.append(f"the script goes by {self._text}")
        return False

    def __iter__(self) -> Any:
        # Twice, for `train, test = split(rows)`, with the same note.
        bool(self)
        return iter((self, self))

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Let the script derive classes from it."""
        return ()

    def __repr__(self) -> str:
        return self._text


for _name in "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow lt le gt ge".split():  # noqa: SIM905
    setattr(Unknown, f"__{_name}__", Unknown.__getitem__)


class Kept:
    """A configuration or a trainer: its arguments are its attributes."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(zip(("model", "reward_funcs", "args"), args, strict=False), **kwargs)
        if self.kind.endswith("Trainer"):
            _trainers.append({"trainer": self.kind, **vars(self)})

    def __getattr__(self, name: str) -> Any:
        if self.kind.endswith("Parser"):
            # What it would read from a command line is not here.
            return lambda **_: [each() for each in self.model]
        return Unknown(f"{self.kind}.{name}")


class Package(types.ModuleType):
    """A foreign package: it has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_kept = name.endswith(("Config", "Arguments", "Parser", "Trainer"))
        return type(name, (Kept,), {"kind": name}) if is_kept else Unknown(name)


class Finder(MetaPathFinder, Loader):
    """Finds every module that neither Python nor the script's directory has."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec:
        """Return the spec of an empty package."""
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Package:
        """Return the package."""
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A package has no code."""


def written(value: Any) -> Any:
    """The value for JSON, which has none of it."""
    if isinstance(value, Kept):
        return vars(value)
    return {"unknown": getattr(value, "__name__", None) or repr(value)}


def plain(value: Any) -> Any:
    """The argument in JSON's values; as an unknown value if it contains itself."""
    try:
        return json.loads(json.dumps(value, default=written, skipkeys=True))
    except (ValueError, RecursionError) as error:
        return {"unknown": f"{type(value).__name__} ({error})"}


def main() -> None:
    """Run the script that the command line names and print what it did."""
    sys.meta_path.append(Finder())
    del sys.argv[0]
    known = getattr
    # `getattr(torch, config.dtype)` of an unknown name.
    builtins.getattr = lambda value, name, *rest: known(value, str(name), *rest)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:  # noqa: BLE001  an exit of the script too
            _notes.append(f"the script ends early: {type(error).__name__}: {error}")
    trainers = [{name: plain(value) for name, value in each.items()} for each in _trainers]
    found = {"trainers": trainers, "notes": _notes}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
