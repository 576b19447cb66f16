"""First code of the script `async-rl`: `async-rl verifier` without the other commands.

A trainer of another kind starts a verifier and waits for it, and the imports of all commands take
as long as its own start.
"""

from __future__ import annotations

import sys
from typing import NoReturn

_VERIFIER = "verifier"


def main() -> NoReturn:
    """Run `async-rl`."""
    if sys.argv[1:2] != [_VERIFIER]:
        from async_rl.launchers import cli

        cli.main()
    import typer

    from async_rl.launchers.commands.verifier import verifier_commands
    from async_rl.launchers.endings import run

    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    # With a second command, typer keeps the name of the first.
    app.callback()(lambda: None)
    app.add_typer(verifier_commands, name=_VERIFIER)
    run(app)
