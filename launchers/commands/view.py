"""`async-rl view`: serves the web view of runs until it is interrupted.

Invariants: it only reads; it binds loopback by default; every request needs the printed token.
"""

import secrets
from typing import Annotated
from urllib.parse import quote

import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import OutputDir, Port
from async_rl.runs.directory import default_output_dir, find_run

_TOKEN_BYTES = 24


def view(
    run: Annotated[
        str | None,
        typer.Argument(help="name or directory of a run; default: all runs"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to bind; other machines reach any but loopback")
    ] = "127.0.0.1",
    port: Port = 0,
    output_dir: OutputDir = None,
) -> None:
    """Show runs in the browser: curves, processes, samples with coloured tokens. Reads only.

    Examples: async-rl view; async-rl view my-run; async-rl view
    --output-dir /data/runs --port 8200
    """
    from async_rl.core.extras import require

    page = "/"
    if run is not None:
        run_dir = find_run(run, output_dir)
        # The page has the other runs of the directory as well.
        directory = run_dir.parent
        page = f"/runs/{quote(run_dir.name, safe='')}"
    else:
        directory = (output_dir or default_output_dir()).absolute()
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} does not exist: no run has been started there; give --output-dir of runs,"
            " or start one with async-rl launch conf=ppo_code"
        )
    for package in ("jinja2", "starlette", "uvicorn"):
        require(package, "async-rl view")
    from async_rl.runs.view.server import serve

    token = secrets.token_urlsafe(_TOKEN_BYTES)

    def ready(url: str) -> None:
        typer.echo(f"runs of {directory} at {url}{page}?token={token}")
        typer.echo("Ctrl-C ends it")

    serve(directory, host=host, port=port, token=token, ready=ready)
