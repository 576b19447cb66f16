"""The settings that exist, by path, and values as people write them.

The models in `async_rl/config/run.py` are the only source: this module reads their JSON schema.
A choice is one setting, whose value is the name of a variant; the parameters of its variants are
settings below it, and a parameter that several variants have is one setting.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen

Spec = Mapping[str, Any]
"""A part of the JSON schema."""
Changes = dict[str, tuple[object, object]]
"""The old and the new value of settings, by path."""
KIND = "kind"
"""Field of a section that names the variant of a choice."""


@frozen
class Setting:
    """One leaf of the schema. spec: its JSON schema, with range and description; is_choice: its
    value names a variant; variants: the variants of the enclosing choice that have this setting,
    empty outside of a choice.
    """

    path: str
    spec: Spec
    is_choice: bool = False
    variants: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The string below the field, as one line; empty for an entry of a mapping."""
        return " ".join(str(self.spec.get("description", "")).split())

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a choice; empty for other settings."""
        return tuple(self.spec.get("enum", ()))

    @property
    def is_list_of_strings(self) -> bool:
        """True if one string is accepted as a list of one."""
        return bool(self.spec.get("items", {}).get("type") == "string")

    @property
    def takes_text(self) -> bool:
        """True if the value is a string or null."""
        return any(spec.get("type") == "string" for spec in self.spec.get("anyOf", [self.spec]))


@functools.cache
def json_schema() -> dict[str, Any]:
    """The JSON schema of a run's configuration, with the description of each field."""
    return RunConfig.model_json_schema()


def members_of(spec: Spec) -> list[Spec]:
    """The sections of a field: one, the variants of a choice, or none for a plain value."""
    definitions: dict[str, Spec] = json_schema()["$defs"]
    references = [spec] if "$ref" in spec else spec.get("oneOf", ())
    return [definitions[reference["$ref"].rpartition("/")[2]] for reference in references]


def kinds_of(section: Spec) -> tuple[str, ...]:
    """The names of the variants that a section describes; empty for a section without a kind."""
    spec = section["properties"].get(KIND, {})
    return tuple(spec.get("enum", [spec["const"]] if "const" in spec else []))


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path, in the order of the schema."""
    return _by_path(_inside("", json_schema()))


@functools.cache
def mappings() -> dict[str, Spec]:
    """Settings that hold sections by a name that people choose: the section by path."""
    return {
        path: setting.spec["additionalProperties"]
        for path, setting in settings().items()
        if "additionalProperties" in setting.spec
    }


@functools.cache
def entry(mapping: str, name: str) -> dict[str, Setting]:
    """The settings of the entry `name` of a mapping, given its path."""
    return _by_path(_field(f"{mapping}.{name}", mappings()[mapping]))


def entry_of(path: str) -> dict[str, Setting]:
    """The settings of the entry of a mapping that contains this path; empty for other paths."""
    # The name of an entry is free, so its settings are not in `settings()`.
    for mapping in mappings():
        if path.startswith(mapping + "."):
            return entry(mapping, path.removeprefix(mapping + ".").partition(".")[0])
    return {}


def find(path: str) -> Setting | None:
    """The setting of this path, in the schema or in an entry of a mapping."""
    return settings().get(path) or entry_of(path).get(path)


@functools.cache
def sections() -> frozenset[str]:
    """Dotted paths of all sections that have settings."""
    return frozenset(
        path[:end] for path in settings() for end, letter in enumerate(path) if letter == "."
    )


def _by_path(listed: Iterable[Setting]) -> dict[str, Setting]:
    """One setting per path; the same parameter of several variants is one setting."""
    result: dict[str, Setting] = {}
    for setting in listed:
        # The first variant describes a parameter that several have.
        first = result.get(setting.path, setting)
        owners = tuple(dict.fromkeys((*first.variants, *setting.variants)))
        result[setting.path] = dataclasses.replace(first, variants=owners)
    return result


def _inside(path: str, section: Spec) -> Iterator[Setting]:
    """Yield every setting of a section."""
    for name, spec in section["properties"].items():
        if name != KIND:
            yield from _field(
                f"{path}.{name}".lstrip("."),
                spec,
                variants=kinds_of(section),
            )


def _field(path: str, spec: Spec, *, variants: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yield the setting of a plain value or of a choice, then the settings of its sections."""
    members = members_of(spec)
    kinds = [kind for member in members for kind in kinds_of(member)]
    # The schema of a choice is a union of sections; people set the name of one.
    if kinds:
        spec = {"enum": kinds, "description": spec.get("description", "")}
    if kinds or not members:
        yield Setting(
            path=path,
            spec=spec,
            is_choice=bool(kinds),
            variants=variants,
        )
    for member in members:
        yield from _inside(path, member)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping by dotted path; a mapping that is a setting is a leaf, and a
    choice has the name of its variant.
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key == KIND:
            yield prefix.removesuffix("."), value
        elif (
            isinstance(value, Mapping) and path not in mappings() and (value or path in sections())
        ):
            yield from flatten(value, path + ".")
        else:
            yield path, value


def changes(before: RunConfig, after: RunConfig) -> Changes:
    """Return the settings that differ between two configurations."""
    # By path, so that a parameter of a variant that only one of the two chose counts as a change.
    old = dict(flatten(as_builtins(before)))
    new = dict(flatten(as_builtins(after)))
    pairs = {path: (old.get(path), new.get(path)) for path in {**old, **new}}
    return {path: (one, other) for path, (one, other) in pairs.items() if one != other}
