"""The base of every section of the configuration, apart from the sections so that each file of them
can use it.
"""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, by keyword; an unknown field is an error."""
