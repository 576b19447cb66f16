"""The settings that exist, by path, and values as people write them.

The models in `async_rl/config/run.py` are the only source: this module reads their JSON schema.
A choice is one setting, whose value is the name of a variant; the parameters of its variants are
settings below it, and a parameter that several variants have is one setting.
"""

import functools
from collections.abc import Iterator, Mapping
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
    """One leaf of the schema. spec: its JSON schema, with range and description; choices: the
    variants that its value may name, empty for other settings.
    """

    path: str
    spec: Spec
    choices: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The string below the field, as one line; empty for an entry of a mapping."""
        return " ".join(str(self.spec.get("description", "")).split())

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
    found: dict[str, Setting] = {}
    _add_section(found, "", json_schema())
    return found


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
    found: dict[str, Setting] = {}
    _add_field(found, f"{mapping}.{name}", mappings()[mapping])
    return found


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


def _add_section(found: dict[str, Setting], path: str, section: Spec) -> None:
    for name, spec in section["properties"].items():
        if name != KIND:
            _add_field(found, f"{path}.{name}".lstrip("."), spec)


def _add_field(found: dict[str, Setting], path: str, spec: Spec) -> None:
    """Add the setting of a plain value or of a choice, then the settings of its sections."""
    members = members_of(spec)
    # The schema of a choice is a union of sections; people set the name of one.
    kinds = tuple(kind for member in members for kind in kinds_of(member))
    if kinds or not members:
        # The first variant describes a parameter that several have; it is one setting.
        found.setdefault(path, Setting(path=path, spec=spec, choices=kinds))
    for member in members:
        _add_section(found, path, member)


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
    return {
        path: (old.get(path), new.get(path)) for path in old | new if old.get(path) != new.get(path)
    }
