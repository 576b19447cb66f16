"""Show that the tests marked with `proves` fail when the product ignores their setting.

usage: mutants.py [--slow] [PATH_PREFIX ...]   (make mutants SETTINGS="algorithm. learner.")

For each setting, a copy of the tree gets a schema in which product code reads the value of conf/
whatever the configuration says; then only the marked tests run. A mutant whose tests all pass
survives: the tests would not notice a product that ignores the setting. Tests, the checks of
`config/checks/` and composition read the real value, so a test that only sees a refusal proves
nothing here.
"""

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic
from mutation import Mutant, main
from proofs import proofs_of

from async_rl.composition.compose import compose
from async_rl.composition.schema import settings
from async_rl.config.base import Section
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError

MUTATION = """

def _ignore_setting() -> None:
    import sys

    import pydantic

    field = {section}.model_fields[{leaf!r}]
    replacement = pydantic.TypeAdapter(field.annotation).validate_json({value!r})

    def read(self):
        reader = sys._getframe(1).f_code.co_filename
        if any(part in reader for part in ("/tests/", "/config/checks/", "/configuration/")):
            return self.__dict__[{leaf!r}]
        return replacement

    setattr({section}, {leaf!r}, property(read))


_ignore_setting()
"""


def sections_of(kind: Any) -> Iterator[type[Section]]:
    """The sections that a field of this type may hold: itself, or the members of a union."""
    if get_origin(kind) is Annotated:
        yield from sections_of(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from sections_of(member)
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield kind


def owners(setting: str) -> list[tuple[type[Section], str]]:
    """The classes with the last part of the path as a field, and the field's name in Python."""
    *parents, leaf = setting.split(".")
    level: list[type[Section]] = [RunConfig]
    for parent in parents:
        level = [
            section
            for kind in level
            for name, field in kind.model_fields.items()
            if (field.alias or name) == parent
            for section in sections_of(field.annotation)
        ]
    return [
        (kind, name)
        for kind in level
        for name, field in kind.model_fields.items()
        if (field.alias or name) == leaf
    ]


def default_of(setting: str) -> Any:
    """The value of the first of conf/'s configurations that has the setting."""
    for conf in ("grpo_code", "ppo_code"):
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(setting)(compose(conf))
    raise ConfigError(f"{setting}: no value in conf/ to replace it with")


def ignoring(setting: str) -> Mutant:
    """The change of the tree that ignores a setting, and the tests that must notice."""
    value = pydantic.TypeAdapter(Any).dump_json(default_of(setting), by_alias=True)
    appended: dict[str, str] = {}
    for section, leaf in owners(setting):
        path = section.__module__.replace(".", "/") + ".py"
        mutation = MUTATION.format(section=section.__name__, leaf=leaf, value=value)
        appended[path] = appended.get(path, "") + mutation
    edits = {path: lambda text, added=added: text + added for path, added in appended.items()}
    return Mutant(name=setting, edits=edits, tests=proofs_of(setting))


if __name__ == "__main__":
    proved = [setting for setting in settings() if proofs_of(setting)]
    sys.exit(main(__doc__, {name: functools.partial(ignoring, name) for name in proved}))
