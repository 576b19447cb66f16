"""First code of the script `async-rl`: what has to happen before the imports of the commands."""

import gc
import sys
from contextlib import suppress
from typing import NoReturn

_OBJECTS_PER_COLLECTION = 50_000
"""Imports make a few hundred thousand objects that stay. With Python's own 700, collections took a
tenth of the start.
"""


def main() -> NoReturn:
    """Run `async-rl`."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # typer stops a command that Ctrl-C interrupts, but its imports take a second before that.
    with suppress(KeyboardInterrupt):
        from async_rl.launchers import cli

        cli.main()
    sys.exit(130)  # as shells report SIGINT
