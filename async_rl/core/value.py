"""The base of the values that processes exchange."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all values on the wire: immutable, by keyword, unknown fields refused."""
