"""The decorator of values that stay inside one process."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def frozen(cls: type[T]) -> type[T]:
    """Make the class a dataclass whose objects are immutable, slotted and made by keyword."""
    # Keyword-only, so that a new field cannot shift the meaning of a call.
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
