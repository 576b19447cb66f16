"""The settings that exist, by path, and the problems of a composed configuration.

The models in `async_rl/config/run.py` are the only source: this module reads their JSON schema and
turns pydantic's errors into one line each: path=value, what is wrong, the remedy, the description.
A choice is one setting, whose value is the name of a variant; the parameters of its variants are
settings below it, and a parameter that several variants have is one setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
from pydantic import ValidationError

from async_rl.config.run import RunConfig
from async_rl.launchers.configuration.choices import KIND, value_at
from async_rl.launchers.configuration.old_names import removal

Spec = Mapping[str, Any]
"""A part of the JSON schema."""


_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of the schema. spec: its JSON schema, with the range; is_choice: its value names a
    variant; variants: those of the enclosing choice that have it, empty outside of a choice.
    """

    path: str
    spec: Spec
    is_required: bool = True
    is_choice: bool = False
    variants: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The text below the field, as one line."""
        return " ".join(self.spec.get("description", "").split())

    @property
    def alternatives(self) -> list[Spec]:
        """The members of a union; a plain setting is its only alternative."""
        return list(self.spec.get("anyOf", [self.spec]))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a choice; empty for others."""
        return tuple(self.spec.get("enum", ()))

    @property
    def is_list_of_strings(self) -> bool:
        """True if one string is accepted as a list of one."""
        items = self.spec.get("items", {})
        return bool(items.get("type") == "string")

    @property
    def takes_text(self) -> bool:
        """True if the value is a string or null."""
        return any(spec.get("type") == "string" for spec in self.alternatives)


@functools.cache
def json_schema() -> dict[str, Any]:
    """The JSON schema of a run's configuration."""
    return RunConfig.model_json_schema()


def _members(spec: Spec) -> list[Spec]:
    """The sections of a field: one, the variants of a choice, or none for a plain value."""
    definitions: dict[str, Spec] = json_schema()["$defs"]
    references = [spec] if "$ref" in spec else spec.get("oneOf", ())
    return [definitions[reference["$ref"].rpartition("/")[2]] for reference in references]


def kinds_of(section: Spec) -> list[str]:
    """The names of the variants that a section stands for; empty for a section without a kind."""
    spec = section["properties"].get(KIND, {})
    return list(spec.get("enum", [spec["const"]] if "const" in spec else []))


@functools.cache
def section_specs() -> dict[str, tuple[Spec, ...]]:
    """The JSON schemas of every section by its dotted path, one for each variant of a choice; the
    run itself has the empty path.
    """
    specs: dict[str, tuple[Spec, ...]] = {}

    def walk(path: str, spec: Spec) -> None:
        specs[path] = (*specs.get(path, ()), spec)
        for name, field in spec["properties"].items():
            for member in _members(field):
                walk(f"{path}.{name}".lstrip("."), member)

    walk("", json_schema())
    return specs


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path, in the order of the schema."""
    return _by_path(_walk(json_schema(), ""))


@functools.cache
def mappings() -> dict[str, Spec]:
    """Settings that hold sections by a name that people choose: the section by path."""
    return {
        path: setting.spec["additionalProperties"]
        for path, setting in settings().items()
        if "additionalProperties" in setting.spec
    }


@functools.cache
def entry(place: str, name: str) -> dict[str, Setting]:
    """The settings of the entry `name` of the mapping at `place`."""
    return _by_path(_field(f"{place}.{name}", mappings()[place], is_required=True))


def entry_of(path: str) -> dict[str, Setting]:
    """The settings of the entry of a mapping that contains this path; empty for other paths."""
    for place in mappings():
        if path.startswith(place + "."):
            return entry(place, path.removeprefix(place + ".").partition(".")[0])
    return {}


def find(path: str) -> Setting | None:
    """The setting of this path, in the schema or in an entry of a mapping."""
    return settings().get(path) or entry_of(path).get(path)


@functools.cache
def sections() -> frozenset[str]:
    """Dotted paths of all sections, choices included."""
    return frozenset(section_specs()) - {""}


def _by_path(listed: Iterable[Setting]) -> dict[str, Setting]:
    """One setting per path; the same parameter of several variants is one setting."""
    result: dict[str, Setting] = {}
    for setting in listed:
        variants = setting.variants
        if setting.path in result:
            variants = tuple(dict.fromkeys(result[setting.path].variants + variants))
            setting = result[setting.path]
        result[setting.path] = dataclasses.replace(setting, variants=variants)
    return result


def _walk(section: Spec, prefix: str) -> Iterator[Setting]:
    variants = tuple(kinds_of(section))
    for name, spec in section["properties"].items():
        if name == KIND:
            continue
        for setting in _field(prefix + name, spec, is_required=name in section.get("required", ())):
            is_direct = "." not in setting.path.removeprefix(prefix)
            yield dataclasses.replace(setting, variants=variants) if is_direct else setting


def _field(path: str, spec: Spec, *, is_required: bool) -> Iterator[Setting]:
    members = _members(spec)
    kinds = [kind for member in members for kind in kinds_of(member)]
    if not members:
        yield Setting(path=path, spec=spec, is_required=is_required)
    elif kinds:
        described = {"enum": kinds, "description": spec.get("description", "")}
        yield Setting(path=path, spec=described, is_required=is_required, is_choice=True)
    for member in members:
        yield from _walk(member, f"{path}.")


def nearest(path: str, *, among: Iterable[str]) -> str | None:
    """The candidate most like `path`, by the whole path or its last part; None without a match."""
    leaf = path.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        own_leaf = candidate.rsplit(".", 1)[-1]
        by_leaf = difflib.SequenceMatcher(None, leaf, own_leaf).ratio()
        if min(len(leaf), len(own_leaf)) >= 4 and (leaf in own_leaf or own_leaf in leaf):
            by_leaf = max(by_leaf, 0.85)
        by_path = difflib.SequenceMatcher(None, path, candidate).ratio()
        # People remember the last part; the path breaks ties between equal last parts.
        return max(by_path, 0.9 * by_leaf + 0.1 * by_path)

    best = max(among, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


@functools.cache
def known_names() -> dict[str, str]:
    """The setting here by its name in other trainers."""
    text = resources.files(__package__).joinpath("known_names.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, str])


def unknown(path: str, value: str) -> str:
    """The problem of a key that does not exist."""
    if (reason := removal(path)) is not None:
        return f"{path}={value}: is no longer a setting: {reason}; leave it out"
    inner = entry_of(path)
    # By meaning first: likeness of letters leads from learning_rate to learner.minibatches.
    best = known_names().get(path.rpartition(".")[2])
    if best is None or inner:
        best = nearest(path, among=inner or [*settings(), *sections()])
    start = f"{path}={value}: there is no such setting"
    if best is None and inner:
        return f"{start}; there are {', '.join(leaf.rpartition('.')[2] for leaf in inner)}"
    if best is None:
        return f"{start}; --dry-run shows all that exist"
    setting = find(best)
    if setting is None:
        inside = [p for p in settings() if p.startswith(best + ".")]
        return f"{start}; the nearest is the section {best} with {', '.join(inside[:6])}"
    return f"{start}; did you mean {best} ({setting.description})?"


def of_another_variant(setting: Setting, value: Any, chosen: str) -> str:
    """The problem of a parameter that the chosen variant does not have."""
    choice, _, name = setting.path.rpartition(".")
    owners = ", ".join(setting.variants)
    return (
        f"{setting.path}={show(value)}: {choice}={chosen} has no {name}, which belongs to {owners};"
        f" leave it out, or set {choice}={setting.variants[0]}"
    )


def show(value: Any) -> str:
    """A value as a person would write it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"
    return str(value)


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


def span(spec: Spec) -> str:
    """The allowed values of a JSON schema, in words: `whole number >= 1 or null`."""
    if "anyOf" in spec:
        return " or ".join(span(member) for member in spec["anyOf"])
    if "enum" in spec:
        return ", ".join(spec["enum"])
    if "prefixItems" in spec:
        return "list of " + " and ".join(span(member) for member in spec["prefixItems"])
    if "items" in spec:
        return f"list of {span(spec['items'])}"
    words = [_TYPES[spec["type"]]]
    words += [f"{sign} {spec[bound]:g}" for bound, sign in _BOUNDS.items() if bound in spec]
    if "pattern" in spec:
        words.append(f"like `{spec['pattern']}`")
    if "minLength" in spec:
        words.append("(not empty)")
    return " ".join(words)


def problems(tree: Mapping[str, Any]) -> dict[str, str]:
    """All wrong keys, types and ranges of a composed configuration, by path; empty if it fits."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        by_path: dict[str, str] = {}
        for one in error.errors():
            for path, text in _problems_of(dict(one), tree):
                by_path.setdefault(path, text)
        return by_path
    return {}


def _problems_of(error: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    path, value = _setting_path(error["loc"]), error["input"]
    setting, choice = find(path), path.rpartition(".")[0]
    if error["type"] == "extra_forbidden" and setting is not None:
        chosen = value_at(tree, choice)[KIND]
        if chosen not in setting.variants:  # else the choice itself is wrong, and reported
            yield path, of_another_variant(setting, value, chosen)
    elif error["type"] == "extra_forbidden":
        # A section of an unknown name may have many values; each is reported in its own line.
        is_section = isinstance(value, Mapping) and bool(value)
        leaves = flatten(value, f"{path}.") if is_section else [(path, value)]
        yield from ((leaf, unknown(leaf, show(inner))) for leaf, inner in leaves)
    elif error["type"] == "missing" and value_at(tree, path) is None:
        inside = [s for leaf, s in settings().items() if leaf.startswith(f"{path}.")]
        for absent in [setting] if setting is not None else inside:
            remedy = f"set {absent.path}=<value>"
            yield absent.path, f"{absent.path} is missing: {absent.description}; {remedy}"
    elif setting is not None and setting.is_choice:
        allowed = error.get("ctx", {}).get("expected", "").replace("'", "")
        yield path, _wrong_choice(setting, value_at(tree, path), allowed)
    elif setting is not None:
        yield path, wrong_value(setting, value_at(tree, path))
    else:
        remedy = f"set one of its settings, {path}.<name>=<value>"
        yield path, f"{path}={show(value)}: {path} is a section; {remedy}"


def _wrong_choice(setting: Setting, value: Any, allowed: str) -> str:
    """allowed: the variants, if only some are possible with the choice around this one."""
    if isinstance(value, Mapping) and KIND not in value:
        given = ", ".join(value)
        remedy = f"set {setting.path}=<one of {', '.join(setting.choices)}>"
        return f"{setting.path}: {given} is given without a variant; {remedy}"
    kind = value[KIND] if isinstance(value, Mapping) else value
    if kind in setting.choices:
        outer = setting.path.rpartition(".")[0]
        return f"{setting.path}={kind}: must be {allowed} with the chosen {outer}"
    return wrong_value(setting, kind)


def _setting_path(location: tuple[int | str, ...]) -> str:
    """The path of a setting or section: without the index in a list that follows it, and without
    the names of variants, which pydantic adds after a choice.
    """
    path = ""
    for part in location:
        setting = find(path)
        if setting is not None and setting.is_choice:
            if part in (*setting.choices, KIND):
                continue
        elif setting is not None and path not in mappings():
            break
        path = f"{path}.{part}".lstrip(".")
    return path


def wrong_value(setting: Setting, value: Any) -> str:
    """The problem of a value that does not fit its setting."""
    shown, meaning = f"{setting.path}={show(value)}", f"({setting.description})"
    if setting.choices:
        best = nearest(str(value), among=setting.choices)
        hint = f"; did you mean {best}?" if best else ""
        return f"{shown}: must be one of {', '.join(setting.choices)}{hint} {meaning}"
    if setting.takes_text and isinstance(value, bool | int | float):
        quoted = f"'{setting.path}=\"{show(value)}\"'"
        return f"{shown}: must be text; put it in quotes: {quoted} {meaning}"
    words = span(setting.spec).replace("true, false", "true or false")
    article = "a " if words.startswith(("whole", "number", "list", "mapping")) else ""
    return f"{shown}: must be {article}{words} {meaning}"
