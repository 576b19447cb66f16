"""The base of every section of the configuration.

A section is immutable, refuses unknown fields and never converts text to numbers.  The text below a
field is its description; `launchers/configuration/schema.py` and the documentation read it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """A part of the configuration. It holds no defaults: conf/ has them all."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def replace(section: AnySection, **changes: Any) -> AnySection:
    """Return a copy with these fields changed and validated. Raises pydantic.ValidationError."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section).model_validate(fields | changes)


def as_builtins(section: Section) -> dict[str, Any]:
    """Return the values as dicts, lists and scalars."""
    # Only entries of generators.pools have defaults: what such an entry leaves out stays left out.
    return section.model_dump(exclude_defaults=True)
