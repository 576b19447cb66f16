"""The command line `async-rl`: collects the commands and turns typed errors into exit codes.

Invariants: wrong settings exit with 2 before any process starts, a failed run exits with 1; one
line per problem and no traceback; importing this module loads nothing heavy (torch, vLLM,
transformers); output goes to stdout, problems to stderr.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, NoReturn

import typer

from async_rl import __version__
from async_rl.launchers.commands.certify import certify
from async_rl.launchers.commands.compare import compare
from async_rl.launchers.commands.convert import convert
from async_rl.launchers.commands.data import data
from async_rl.launchers.commands.doctor import doctor
from async_rl.launchers.commands.eval import evaluate
from async_rl.launchers.commands.explain import explain
from async_rl.launchers.commands.export import export
from async_rl.launchers.commands.init import init
from async_rl.launchers.commands.launch import launch, resume
from async_rl.launchers.commands.ledger import ledger
from async_rl.launchers.commands.list_runs import list_runs
from async_rl.launchers.commands.logs import logs
from async_rl.launchers.commands.migrate import migrate
from async_rl.launchers.commands.plan import plan
from async_rl.launchers.commands.replay import replay
from async_rl.launchers.commands.rollouts import show_rollouts
from async_rl.launchers.commands.scale import scale
from async_rl.launchers.commands.serve import serve
from async_rl.launchers.commands.status import status
from async_rl.launchers.commands.stop import stop
from async_rl.launchers.commands.verifier import verifier
from async_rl.launchers.commands.verify import verify
from async_rl.launchers.commands.view import view
from async_rl.launchers.endings import run

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# In the order of --help.
_COMMANDS: Mapping[str, Callable[..., None]] = {
    "launch": launch,
    "serve": serve,
    "status": status,
    "runs": list_runs,
    "view": view,
    "logs": logs,
    "stop": stop,
    "resume": resume,
    "scale": scale,
    "ledger": ledger,
    "certify": certify,
    "rollouts": show_rollouts,
    "eval": evaluate,
    "export": export,
    "convert": convert,
    "explain": explain,
    "plan": plan,
    "replay": replay,
    "compare": compare,
    "doctor": doctor,
    "init": init,
    "verify": verify,
    "verifier": verifier,
    "migrate": migrate,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data, name="data")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"async-rl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        # Its own callback: the function below is only called with a command.
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models."""


def main() -> NoReturn:
    """Run `async-rl`."""
    run(app)


if __name__ == "__main__":
    main()
