"""`key=value` settings of the command line, in hydra's syntax.

Invariants: the result names only groups, sections and settings that exist;
text needs no quotes (paths with spaces, names that look like numbers); no two overrides name the
same setting, so their order does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from async_rl.composition import schema
from async_rl.composition.choices import KIND, choices_first
from async_rl.composition.problems import unknown
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen

_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE)
"""Text that means itself without quotes: names of files and choices among them need that."""


def as_words(overrides: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Return overrides as `key=value` words. A mapping may be nested, and its keys may be dotted.

    Raises ConfigError for values that no setting can have.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"{overrides}: is a single string; give a list, as in [{overrides!r}]")
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
        f"{path}: a {type(value).__name__} cannot be the value of a setting; give text, a number,"
        " True, False, None, a list or a dict"
    )


def _quoted(text: str) -> str:
    """Put text in quotes for hydra, which takes a backslash literally except before a quote."""
    inner = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + match[2].replace('"', r"\""), text)
    return f'"{inner}"'


def with_defaults(overrides: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """Return the overrides, after the defaults for settings that none of them names."""
    given = {_name(word) for word in overrides}
    return [*(word for word in defaults if _name(word) not in given), *overrides]


@frozen
class Overrides:
    """groups: choices of files, as hydra reads them; values: settings by path, choices of variants
    first; problems: one line for each wrong override.
    """

    groups: list[str]
    values: list[tuple[str, Any]]
    problems: list[str]


def read_overrides(overrides: Sequence[str], directories: Sequence[Path]) -> Overrides:
    """Read the overrides.

    directories: folders with the groups of files to choose from (task, model, algorithm, hardware).
    """
    groups = _groups(directories)
    chosen: list[str] = []
    values: list[tuple[str, Any]] = []
    problems: list[str] = []
    first: dict[str, str] = {}
    for given in overrides:
        text = _quoted_if_text(given)
        override = _parse(text)
        wrong = list(_problems(override, given, groups))
        # A long command with a forgotten word would otherwise run with the wrong value.
        name = _name(given)
        if name in first:
            wrong.append(f"{given}: was already given as {first[name]}; give each setting once")
        first.setdefault(name, given)
        problems += wrong
        if override is None or wrong:
            continue
        if override.key_or_group in groups:
            chosen.append(text)
        else:
            values.append((override.key_or_group, override.value()))
    return Overrides(groups=chosen, values=choices_first(values), problems=problems)


def _name(given: str) -> str:
    """The name of the setting that an override sets, the same for all its forms."""
    return given.partition("=")[0].strip().removesuffix(f".{KIND}")


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
    return given if is_text or value[0] in "[\"'" else f"{key}={_quoted(value)}"


def _problems(
    override: Override | None, given: str, groups: Mapping[str, list[str]]
) -> Iterator[str]:
    """Yield what is wrong with one override: its form, the file that it chooses, or its path."""
    if override is None:
        has_value = "=" in given
        key, _, value = given.partition("=")
        remedy = f"cannot be read; put the value in quotes, '{key}=\"{value}\"'"
        yield f"{given}: {remedy if has_value else 'is not of the form key=value'}"
    elif override.is_delete() or override.is_add():
        key = override.key_or_group
        remedy = f"write {key}=<value> to change one"
        yield f"{given}: settings can be neither added nor removed; {remedy}"
    elif override.is_sweep_override():
        key = override.key_or_group
        yield f"{given}: is a choice of several values; write a list as {key}=[a,b]"
    elif override.key_or_group in groups and isinstance(override.value(), str):
        yield from _missing_file(override, given, groups)
    else:
        yield from _wrong_paths(override, given)


def _missing_file(override: Override, given: str, groups: Mapping[str, list[str]]) -> Iterator[str]:
    group = override.key_or_group
    if given.partition("=")[2] not in groups[group]:
        hint = "; a model is named by model.path" if group == "model" else ""
        yield f"{given}: conf/{group}/ has {', '.join(groups[group])}{hint}"


def _wrong_paths(override: Override, given: str) -> Iterator[str]:
    key, value = override.key_or_group, override.value()
    is_section = key in schema.sections()
    if isinstance(value, dict) and (is_section or schema.entry_of(key)):
        inside = schema.flatten({str(name): inner for name, inner in value.items()}, f"{key}.")
        yield from (unknown(path, schema.show(inner)) for path, inner in inside if not _is(path))
    elif not _is(key) and not schema.entry_of(key):
        remedy = f"{key} is a section; set one of its settings, {key}.<name>=<value>"
        yield f"{given}: {remedy}" if is_section else unknown(key, given.partition("=")[2])


def _is(path: str) -> bool:
    """Return whether there is a setting of this path, or a choice whose `kind` it names."""
    return bool(schema.find(path) or schema.find(path.removesuffix(f".{KIND}")))


def _groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Groups with the files to choose from."""
    files = [path for directory in directories for path in directory.glob("*/*.yaml")]
    return {
        group: sorted({path.stem for path in files if path.parent.name == group})
        for group in {path.parent.name for path in files}
    }
