"""First code of the script `async-rl`: `async-rl verifier` without the other commands.

A trainer of another kind starts a verifier and waits for it, and the imports of all commands take
as long as its own start.
"""

import gc
import sys
from contextlib import suppress
from typing import NoReturn

_VERIFIER = "verifier"
_OBJECTS_PER_COLLECTION = 50_000
"""Imports make a few hundred thousand objects that stay. With Python's own 700, collections took a
tenth of the start.
"""


def main() -> NoReturn:
    """Run `async-rl`."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # typer stops a command that Ctrl-C interrupts, but its imports take a second before that.
    with suppress(KeyboardInterrupt):
        if sys.argv[1:2] != [_VERIFIER]:
            from async_rl.launchers import cli

            cli.main()
        import typer

        from async_rl.launchers.commands.verifier import verifier
        from async_rl.launchers.endings import run

        app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        # With a second command, typer keeps the name of the first.
        app.callback()(lambda: None)
        app.command()(verifier)
        run(app)
    sys.exit(130)  # as shells report SIGINT
