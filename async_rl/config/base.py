"""The base of every section of the configuration.

A section is immutable, rejects unknown fields and never converts text to numbers.  The string below
a field is its description; error messages and docs/configuration.md show it.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

AnySection = TypeVar("AnySection", bound="Section")


def absolute(path: str) -> str:
    """Return a path as an absolute one; a URL and an empty text stay as they are."""
    is_local = path != "" and "://" not in path
    return os.path.abspath(os.path.expanduser(path)) if is_local else path


def is_function(name: str) -> bool:
    """Return whether this names a function, as `package.module:function` or `file.py:function`."""
    return re.match(r"^(?:[\w.]+|.+\.py):\w+$", name) is not None


def by_name(entries: Iterable[str]) -> dict[str, str]:
    """Return the values of name=value pairs as they are written."""
    return dict(entry.split("=", maxsplit=1) for entry in entries)


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, Field(pattern="^\\w+$")]
# Absolute, because the processes of a run start in other directories than the command line.
LocalPath = Annotated[str, Field(min_length=1), AfterValidator(absolute)]
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""Accepts one string where a list of strings is wanted."""
Entries = Annotated[list[Annotated[str, Field(pattern="^\\w+=(?s:.+)$")]], OneOrMore]
"""name=value pairs."""
Tag = Field(discriminator="kind")
"""Marks a choice: a union of sections, distinguished by their field `kind`."""


class Section(BaseModel):
    """A part of the configuration, without defaults: conf/ has all of them."""

    # defer_build: every command waits for these classes, and most commands validate none of them.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, use_attribute_docstrings=True
    )


def replace(section: AnySection, **changes: Any) -> AnySection:
    """Return a copy with these fields changed and validated. Raises pydantic.ValidationError."""
    # Not model_copy, which would take the new values unchecked.
    return type(section).model_validate(dict(section) | changes)


def with_settings(section: AnySection, settings: Mapping[str, Any]) -> AnySection:
    """Return a copy with other values of settings, by their paths below the section."""
    for path, value in settings.items():
        name, _, rest = path.partition(".")
        inner = with_settings(getattr(section, name), {rest: value}) if rest else value
        section = replace(section, **{name: inner})
    return section


def as_builtins(section: Section) -> dict[str, Any]:
    """Return the values as dicts, lists and scalars."""
    # Only entries of generators.pools have defaults; a field that an entry omits stays omitted.
    return section.model_dump(exclude_defaults=True)


def show(value: Any, text: Callable[[Any], str] = str) -> str:
    """A value as a person would write it in an override. text: writes what is not a number."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(inner, text)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(inner, text) for inner in value) + "]"
    # A whole number, as people write it where a setting may have a fraction.
    return str(value).removesuffix(".0") if isinstance(value, int | float) else text(value)
