"""`key=value` settings of the command line, in hydra's syntax, checked before hydra sees them.

Invariants: the result is valid for hydra and names only groups, sections and settings that exist;
text needs no quotes (paths with spaces, names that look like numbers).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from async_rl.core.errors import ConfigError
from async_rl.launchers.configuration import schema

_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE)
"""Text that means itself without quotes: names of files and choices among them need that."""


def as_words(overrides: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Return overrides as `key=value` words. A mapping may be nested, and its keys may be dotted.

    Raises ConfigError for values that no setting can have.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"{overrides}: is one text; give a list, as in [{overrides!r}]")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{path}={_written(path, value)}" for path, value in schema.flatten(overrides)]


def _written(path: str, value: object) -> str:
    match value:
        case str() if _PLAIN.fullmatch(value):
            return value
        case str():
            return _quoted(value)
        case None | bool() | int() | float():
            return schema.show(value)
        case Mapping():
            inner = (f"{name}:{_written(path, entry)}" for name, entry in value.items())
            return "{" + ",".join(inner) + "}"
        case list() | tuple():
            return "[" + ",".join(_written(path, entry) for entry in value) + "]"
        case Path():
            return _written(path, str(value))
    raise ConfigError(
        f"{path}: a {type(value).__name__} is no value of a setting; give text, a number, True,"
        " False, None, a list or a dict"
    )


def _quoted(text: str) -> str:
    """Put text in quotes for hydra, which takes a backslash literally except before a quote."""
    inner = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + match[2].replace('"', r"\""), text)
    return f'"{inner}"'


def readable(overrides: Sequence[str], directories: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the overrides that hydra can read, and one line for each wrong one.

    directories: folders with the groups of files to choose from (task, model, algorithm, hardware).
    """
    groups = _groups(directories)
    problems: list[str] = []
    result: list[str] = []
    for given in overrides:
        text = _quoted_if_text(given)
        override = _parse(text)
        wrong = [_unreadable(given)] if override is None else _problems(override, given, groups)
        problems += wrong
        if not wrong:
            result.append(text)
    return result, problems


def as_tree(checked: Sequence[str]) -> DictConfig:
    """Return the overrides, checked by `readable`, as a configuration of their values alone."""
    tree = OmegaConf.create({})
    for override in map(_parse, checked):
        if override is not None:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
    return tree


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _quoted_if_text(given: str) -> str:
    """The override with its value in quotes, where the setting is text and the value would be no
    text or not readable without.
    """
    key, _, value = given.partition("=")
    setting = schema.find(key)
    if setting is None or not value or not (setting.takes_text or setting.is_list_of_strings):
        return given
    override = _parse(given)
    is_text = override is not None and (
        override.is_sweep_override() or not isinstance(override.value(), bool | int | float)
    )
    if is_text or value[0] in "[\"'":
        return given
    return f"{key}={_quoted(value)}"


def _problems(override: Override, given: str, groups: dict[str, list[str]]) -> list[str]:
    key, value = override.key_or_group, given.partition("=")[2]
    if override.is_delete() or override.is_add():
        return [
            f"{given}: settings can be neither added nor removed; write {key}=<value> to change one"
        ]
    if override.is_sweep_override():
        return [f"{given}: is a choice of several values; write a list as {key}=[a,b]"]
    if isinstance(override.value(), dict) and key in schema.sections():
        inside = schema.flatten(
            {str(name): inner for name, inner in override.value().items()}, key + "."
        )
        return [
            schema.unknown(path, schema.show(inner))
            for path, inner in inside
            if path not in schema.settings()
        ]
    if schema.entry_of(key) and isinstance(override.value(), dict):
        return []  # an entry of a mapping is checked after composition
    if key in groups:
        hint = "; a model is named by model.path" if key == "model" else ""
        return (
            []
            if value in groups[key]
            else [f"{given}: conf/{key}/ has {', '.join(groups[key])}{hint}"]
        )
    if key in schema.sections():
        return [f"{given}: {key} is a section; set one of its settings, {key}.<name>=<value>"]
    return [] if schema.find(key) else [schema.unknown(key, value)]


def _unreadable(given: str) -> str:
    key, equals, value = given.partition("=")
    if not equals:
        return f"{given}: is not of the form key=value"
    return f"{given}: cannot be read; put the value in quotes, '{key}=\"{value}\"'"


def _groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Groups with the files to choose from."""
    files = [path for directory in directories for path in directory.glob("*/*.yaml")]
    return {
        group: sorted({path.stem for path in files if path.parent.name == group})
        for group in {path.parent.name for path in files}
    }
