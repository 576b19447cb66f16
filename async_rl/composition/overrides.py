"""`key=value` settings of the command line, read by hydra's parser.

Invariants: text needs no quotes (paths with spaces, names that look like numbers); no two overrides
name the same setting, so their order does not matter.  The schema reports unknown settings.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from async_rl.composition import schema
from async_rl.composition.schema import KIND, choices_first
from async_rl.config.base import show
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen

_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE)
"""Text that means itself without quotes: names of files and choices among them need that."""


def as_words(overrides: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Return overrides as `key=value` words. A mapping may be nested, and its keys may be dotted.

    Raises ConfigError for a single string.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"{overrides}: is a single string; give a list, as in [{overrides!r}]")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{path}={show(value, _text)}" for path, value in schema.flatten(overrides)]


def _text(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else _quoted(text)


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
    """groups: choices of files, for hydra; values: settings by path, choices of variants first;
    problems: one line for each override that cannot be read.
    """

    groups: list[str]
    values: dict[str, Any]
    problems: list[str]


def read_overrides(overrides: Sequence[str], directories: Sequence[Path]) -> Overrides:
    """Read the overrides.

    directories: folders with the groups of files to choose from (task, model, algorithm, hardware).
    """
    groups: list[str] = []
    values: list[tuple[str, Any]] = []
    problems: list[str] = []
    first: dict[str, str] = {}
    for word in overrides:
        name = _name(word)
        try:
            override = _parse(word)
            # A long command with a forgotten word would otherwise run with the wrong value.
            if name in first:
                raise ConfigError(
                    f"{word}: was already given as {first[name]}; give each setting once"
                )
            value = override.value()
            # A folder of conf/, or of the directory of the person's own file.
            is_group = any((directory / name).is_dir() for directory in directories)
            if is_group and isinstance(value, str):
                groups.append(str(override.input_line))
            # As single settings, so that the rest of the section keeps its values.
            elif isinstance(value, dict):
                values += schema.flatten(value, f"{name}.")
            else:
                values.append((name, value))
        except ConfigError as error:
            problems.append(str(error))
        first.setdefault(name, word)
    return Overrides(groups=groups, values=choices_first(values), problems=problems)


def _name(word: str) -> str:
    """The name of the setting that an override sets, the same for all its forms."""
    return word.partition("=")[0].strip().removesuffix(f".{KIND}")


# A parse takes 2 ms; `migrate` composes the same hundred settings several times.
@functools.cache
def _parse(word: str) -> Override:
    """Read one override. Raises ConfigError if it is not of the form key=value."""
    key = word.partition("=")[0].lstrip("+~")
    problem = (
        f"{word}: is not of the form key=value with one value; write {key}=<value>, a list as"
        f" {key}=[a,b], and text with other signs than letters and digits in quotes"
    )
    try:
        override = OverridesParser.create().parse_override(_quoted_if_text(word))
    except HydraException as error:
        raise ConfigError(problem) from error
    # Settings can be neither added nor removed, and a run has one value of each.
    if override.is_delete() or override.is_add() or override.is_sweep_override():
        raise ConfigError(problem)
    return override


def _quoted_if_text(word: str) -> str:
    """The override with its value in quotes, where the setting is text and hydra would read the
    value as something else.
    """
    key, _, value = word.partition("=")
    setting = schema.find(key)
    # `a,b` would be a sweep, which the caller refuses with its remedy for a list.
    is_text = setting is not None and (
        setting.takes_text or (setting.is_list_of_strings and "," not in value)
    )
    is_written = not value or value[0] in "[\"'" or value.lower() == "null"
    if is_text and not is_written:
        return f"{key}={_quoted(value)}"
    return word
