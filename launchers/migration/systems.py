"""The source systems, and which of them a configuration belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from async_rl.core.errors import ConfigError
from async_rl.launchers.migration import shared
from async_rl.launchers.migration.applying import Migration, migrate
from async_rl.launchers.migration.rules import read_table
from async_rl.launchers.migration.sources import read_source

SYSTEMS = ("verl", "areal", "areal_now", "prime_rl", "openrlhf", "trl")
"""Each has a table, `<name>.yaml`, and a module with the functions that the table names; the first
that recognizes a source is it.
"""


def read(file: Path, overrides: Sequence[str] = ()) -> Migration:
    """Translate a file. Raises ConfigError if no system is recognized."""
    source = read_source(file, overrides)
    tables = {name: read_table(name) for name in SYSTEMS}
    for name, table in tables.items():
        if table.recognizes(source):
            module = import_module(f"{__package__}.{name}")
            return migrate(source, table, vars(shared) | vars(module))
    known = "; ".join(
        f"{table.title}: {' or '.join(', '.join(marks) for marks in table.marks)}"
        for table in tables.values()
    )
    raise ConfigError(
        f"{file}: the configuration of no system that migrate knows. Each is recognized by its"
        f" keys: {known}"
    )
