"""`async-rl verifier`: the verifier's HTTP server without a run.

Invariants: settings come from conf/ and the arguments; it binds loopback by default; it always
requires a token, and prints one if none is given; the first SIGTERM or Ctrl-C drains, the second
exits immediately.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import Port, Settings

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig

T = TypeVar("T")
_TOKEN_BYTES = 24
_LEVELS = {1: "namespaces", 2: "Landlock and seccomp", 3: "none: programs run unconfined"}


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], cells: int) -> None:
    """Call `work` for every item, for as many at a time as keep all cells of a verifier busy."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    async with asyncio.TaskGroup() as group:
        # Two for each cell: the next program is ready when a cell becomes free.
        for number in range(2 * cells):
            group.create_task(worker(), name=f"worker {number}")


def verifier(
    settings: Settings = None,
    host: Annotated[str | None, typer.Option(help="address to bind; default: loopback")] = None,
    port: Port = 0,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ASYNC_RL_TOKEN",
            help="token that clients must send; default: a new one, which is printed",
        ),
    ] = None,
) -> None:
    """Serve verdicts over HTTP until stopped, without a run. Settings of sandbox, verifiers and
    reward can differ from conf/.

    Examples: async-rl verifier; async-rl verifier --port 8080 verifiers.cells=4 sandbox.timeout_s=5
    """
    # The imports of a composer take half a second, which `async-rl verifier --help` need not wait.
    from async_rl.composition.compose import verifier_config
    from async_rl.wire.addresses import host_for_people

    config = verifier_config(settings or [])

    # An empty variable of the environment would mean no protection.
    if token == "":
        raise ConfigError("--token is empty; give one, or omit the option to get a new one")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    address = host or host_for_people(config.network)
    asyncio.run(_serve(config, address, port, token))


async def _serve(config: RunConfig, host: str, port: int, token: str | None) -> None:
    from async_rl.rewards.verifier.serving import open_service, serve
    from async_rl.wire.http import listen

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        # Without our handler, the next signal kills the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # Never without a token: any user of the machine reaches loopback.
    secret = token or secrets.token_urlsafe(_TOKEN_BYTES)
    with listen(host, port) as listener:
        async with open_service(config, has_functions=True) as service:

            async def ready(url: str) -> None:
                level = service.cells.level
                jail = f"jail level {level}: {_LEVELS[level]}; {service.num_cells} cells"
                typer.echo(f"verifier at {url} ({jail})")
                if token is None:
                    typer.echo(f"token {secret}")
                for reason in service.cells.reasons:
                    typer.echo(f"a stronger jail was not possible: {reason}")

            await serve(
                service,
                listener,
                token=secret,
                ready=ready,
                stopping=stopping,
                log=logging.getLogger("async_rl"),
            )
    typer.echo("verifier ended: all admitted requests are answered")
