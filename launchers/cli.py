"""The command line `async-rl`: finds the commands and turns typed errors into exit codes.

Invariants: wrong settings exit with 2 before any process starts, a failed run exits with 1; one
line per problem and no traceback; only the module of the named command is imported, because those
of all commands take a second; output goes to stdout, problems to stderr.
"""

import sys
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Annotated, NoReturn

import typer

from async_rl import __version__
from async_rl.launchers import commands
from async_rl.launchers.endings import run

_COMMANDS = {
    "launch": "launch:launch",
    "serve": "launch:serve",
    "status": "live:status",
    "runs": "live:list_runs",
    "view": "reports:view",
    "logs": "live:logs",
    "stop": "live:stop",
    "resume": "launch:resume",
    "scale": "live:scale",
    "ledger": "stored:ledger",
    "certify": "reports:certify",
    "rollouts": "stored:show_rollouts",
    "eval": "models:evaluate",
    "export": "models:export",
    "explain": "reports:explain",
    "plan": "reports:plan",
    "replay": "replay:replay",
    "compare": "reports:compare",
    "doctor": "doctor:doctor",
    "init": "init:init",
    "verify": "verifier:verify",
    "verifier": "verifier:verifier",
    "migrate": "migrate:migrate",
    "data": "data:data",
}
"""Module and function of each command, in the order of --help."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"async-rl {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        # Its own callback: the function below is only called with a command.
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models."""


def application(names: Iterable[str] = tuple(_COMMANDS)) -> typer.Typer:
    """Return the command line with the commands of these names."""
    app = typer.Typer(
        callback=_options,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in names:
        command = resolve_name(f"{commands.__name__}.{_COMMANDS[name]}")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> NoReturn:
    """Run `async-rl`."""
    named = [word for word in sys.argv[1:2] if word in _COMMANDS]
    run(application(named or _COMMANDS))


if __name__ == "__main__":
    main()
