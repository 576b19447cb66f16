"""The settings by their dotted paths: which exist, and their values in a tree of dicts.

The models in `async_rl/config/run.py` are the only source of the settings: this module reads their
JSON schema. A choice is one setting, whose value is the name of a variant; the parameters of its
variants are settings below it, and a parameter that several variants have is one setting.
conf/variants.yaml has the parameters of every variant. In a tree a choice is the name of a variant,
or a mapping with the name as `kind` and some of its parameters.
"""

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

import async_rl.conf
from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen

CONF_DIR = Path(async_rl.conf.__file__).resolve().parent
Tree = dict[str, Any]
Spec = Mapping[str, Any]
"""A part of the JSON schema."""
Changes = dict[str, tuple[object, object]]
"""The old and the new value of settings, by path."""
KIND = "kind"
"""Field of a section that names the variant of a choice."""
FUNCTION = "plugin"
"""The variant of a choice that is a function of the user's."""


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


@functools.cache
def variants() -> dict[str, dict[str, Tree]]:
    """The parameters of each variant by the path of its choice; `*` stands for any name."""
    # OmegaConf's reader, as for all of conf/: others take 1e-3 for text.
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "variants.yaml"))
    return msgspec.convert(tree, dict[str, dict[str, Tree]])


def choices_first(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sort settings for `put`: outer choices first, since each resets its parameters."""

    def rank(setting: tuple[str, Any]) -> float:
        path, value = setting
        # An inner choice belongs to a variant of the outer choice.
        return path.count(".") if _is_choice(path, value) else math.inf

    return dict(sorted(values, key=rank))


def _is_choice(path: str, value: Any) -> bool:
    """Return whether setting this value at this path chooses a variant."""
    setting = find(path)
    return isinstance(value, str) and setting is not None and setting.choices != ()


def put(tree: Tree, path: str, value: Any) -> None:
    """In place: set one value; the name of another variant removes the parameters of a choice."""
    *parents, leaf = path.split(".")
    for name in parents:
        child = _as_mapping(tree.get(name))
        tree[name] = child if isinstance(child, dict) else {}
        tree = tree[name]
    before = _as_mapping(tree.get(leaf))
    # A file may have set parameters of the variant that the command line names again: they stay.
    if not (_is_choice(path, value) and isinstance(before, dict) and before.get(KIND) == value):
        tree[leaf] = value


def expand(tree: Tree) -> None:
    """In place: write every choice as a mapping, with the parameters that are not given."""
    # variants.yaml lists an outer choice before the choices inside its variants.
    for choice, by_kind in variants().items():
        place, _, leaf = choice.rpartition(".")
        parent = value_at(tree, place)
        if not isinstance(parent, dict):
            continue
        # list: the loop replaces entries of the mapping.
        for name in list(parent) if leaf == "*" else [leaf]:
            node = _as_mapping(parent.get(name))
            if isinstance(node, dict):
                parent[name] = _complete(node, by_kind)


def _complete(node: Tree, by_kind: dict[str, Tree]) -> Tree:
    """A choice with the parameters of its variant that are not given."""
    kind = node.get(KIND)
    # `module:function` chooses the plug-in of that name.
    if isinstance(kind, str) and ":" in kind and FUNCTION in by_kind:
        node = {**node, KIND: FUNCTION, "fn": kind}
    # An unknown variant is left to the schema. A copy, because `put` changes trees in place.
    defaults = copy.deepcopy(by_kind.get(str(node.get(KIND)), {}))
    for name, default in defaults.items():
        given = node.get(name)
        if name not in node:
            node[name] = default
        elif isinstance(given, dict) and isinstance(default, str):
            # An inner choice of which only parameters are given has the usual variant.
            node[name] = {KIND: default, **given}
    return node


def _as_mapping(value: Any) -> Any:
    return {KIND: value} if isinstance(value, str) else value


def value_at(tree: Any, path: str) -> Any:
    """The value of a setting or section; None where it is missing. An empty path is the tree."""
    for name in filter(None, path.split(".")):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
