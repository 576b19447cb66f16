"""The two bases of immutable values: `frozen` inside one process, `Value` between processes and on
the disk.
"""

import dataclasses
from typing import TypeVar, dataclass_transform

import msgspec

T = TypeVar("T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def frozen(cls: type[T]) -> type[T]:
    """Make the class a dataclass whose objects are immutable, slotted and made by keyword."""
    # Keyword-only, so that a new field cannot shift the meaning of a call.
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


# Unknown fields are refused, so that a peer of another version fails at its first message.
# Subclasses inherit frozen, which type checkers learn from the decorator.
@dataclass_transform(frozen_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values that processes exchange or store: immutable and made by keyword."""
