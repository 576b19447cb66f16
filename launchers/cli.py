"""The command line `async-rl`: finds the commands and turns typed errors into exit codes.

Invariants: wrong settings exit with 2 before any process starts, a failed run exits with 1; one
line per problem and no traceback; only the module of the named command is imported, because those
of all commands take a second; output goes to stdout, in any encoding, problems to stderr.
"""

import codecs
import io
import sys
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Annotated, NoReturn

import typer

from async_rl import __version__
from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.core.extras import missing
from async_rl.core.os import owner_only
from async_rl.launchers import commands

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
EXIT_WRONG_SETTINGS = 2
_SPELLED = {"–": "-", "⟨": "<", "⟩": ">", "±": "+-", "█": "#", "→": "->", "×": "x"}
"""The characters of our own output that ASCII lacks."""


def main() -> NoReturn:
    """Run `async-rl`."""
    named = [word for word in sys.argv[1:2] if word in _COMMANDS]
    run(application(named or _COMMANDS))


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


@owner_only()
def run(app: typer.Typer) -> NoReturn:
    """Run a command line to its end."""
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        # A test or a notebook may have replaced them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")
    try:
        app()
    except AsyncRLError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else 1)
    except OSError as error:
        # A path, its permissions or a full disk; without a path it is a fault of the code.
        if error.filename is None:
            raise
        remedy = "check the path, its permissions and the disk"
        typer.echo(f"error: {error.filename}: {error.strerror}; {remedy}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        # A command whose extra is not installed; any other missing module is a fault of the code.
        problem = missing(str(error.name).partition(".")[0], f"async-rl {' '.join(sys.argv[1:2])}")
        if problem is None:
            raise
        typer.echo(f"error: {problem}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS)
    sys.exit(0)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for what an encoding lacks: responses, names and tables may have any letter."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLED.get(letter) or ascii(letter)[1:-1] for letter in lacking), error.end


if __name__ == "__main__":
    main()
