"""The end of a command: typed errors become exit codes, one line per problem and no traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.core.extras import missing
from async_rl.core.os import owner_only

EXIT_WRONG_SETTINGS = 2


@owner_only()
def run(app: typer.Typer) -> NoReturn:
    """Run a command line to its end."""
    try:
        app()
    except AsyncRLError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        # A command whose extra is not installed; any other missing module is a fault of the code.
        problem = missing(str(error.name).partition(".")[0], f"async-rl {' '.join(sys.argv[1:2])}")
        if problem is None:
            raise
        typer.echo(f"error: {problem}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS)
    sys.exit(0)
