"""The source systems, and which of them a configuration belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from async_rl.core.errors import ConfigError
from async_rl.launchers.migration import shared
from async_rl.launchers.migration.applying import Migration, migrate
from async_rl.launchers.migration.rules import Settings, read_table
from async_rl.launchers.migration.sources import Unreadable, arguments, read_source

SYSTEMS = ("verl", "areal", "areal_now", "trl")
"""Each has a table, `<name>.yaml`, and a module with the functions that the table names; the first
that recognizes a source is it.
"""


def read(
    file: Path, overrides: Sequence[str] = (), *, release: str = "", given: Settings | None = None
) -> Migration:
    """Translate a file. Raises ConfigError if no system is recognized.

    release: name of the release whose defaults absent keys have; given: settings that win.
    """
    tables = {name: read_table(name) for name in SYSTEMS}
    recognized = [
        (source, name)
        for source in read_source(file, overrides)
        for name, table in tables.items()
        if table.recognizes(source)
    ]
    if not recognized:
        raise ConfigError(f"{file}: of no system that migrate knows by its keys (docs/migrate.md)")
    source, name = recognized[0]
    if recognized[-1][0] is not source:
        source["the script"] = Unreadable("it starts several runs; this is the first")
    module = import_module(f"{__package__}.{name}")
    code = vars(shared) | vars(module)
    complete = source | arguments(overrides)
    return migrate(complete, tables[name], code, given or {}, release=release)
