"""The source systems, and which of them a configuration belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from async_rl.core.errors import ConfigError
from async_rl.launchers.migration import areal, areal_now, openrlhf, prime_rl, trl, verl
from async_rl.launchers.migration.applying import Migration, migrate
from async_rl.launchers.migration.rules import Function, read_table
from async_rl.launchers.migration.sources import read_source

FUNCTIONS: Mapping[str, Mapping[str, Function]] = {
    "verl": verl.FUNCTIONS,
    "areal": areal.FUNCTIONS,
    "areal_now": areal_now.FUNCTIONS,
    "prime_rl": prime_rl.FUNCTIONS,
    "openrlhf": openrlhf.FUNCTIONS,
    "trl": trl.FUNCTIONS,
}
"""The functions of each system's table, `<name>.yaml`; the first that recognizes a source is it."""


def read(file: Path, overrides: Sequence[str] = ()) -> Migration:
    """Translate a file. Raises ConfigError if no system is recognized."""
    source = read_source(file, overrides)
    tables = {name: read_table(name) for name in FUNCTIONS}
    for name, table in tables.items():
        if table.recognizes(source):
            return migrate(source, table, FUNCTIONS[name])
    known = "; ".join(
        f"{table.title}: {' or '.join(', '.join(marks) for marks in table.marks)}"
        for table in tables.values()
    )
    raise ConfigError(
        f"{file}: the configuration of no system that migrate knows. Each is recognized by its"
        f" keys: {known}"
    )
